"""Every hook acts on a Ray cluster as it does in one process: the examples, run on both, with equal metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from test_examples import EXAMPLES, OWN, SMALL, Plain, Ran, Run
from workshop import set_up

from slimectl.executors.ray import RayExecutor
from slimectl.hooks import HOOKS
from slimectl.runtime.run import TrainingRun
from slimectl.settings.layers import from_assignments, from_file
from slimectl.settings.loading import resolve

WRITTEN = """
def written(args, version_dir, rollout_engines):
    files = sorted(file.name for file in version_dir.iterdir())
    tell(version=version_dir.name, files=files, engines=len(rollout_engines.urls))
"""


@pytest.fixture(scope="module", autouse=True)
def joined(shared_cluster: Any) -> Iterator[None]:
    """This process joins the cluster once, for all runs of these tests."""
    first = RayExecutor(shared_cluster.address)
    yield
    first.close()


@pytest.fixture
def run(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[..., Path], monkeypatch: Any, shared_cluster: Any
) -> Run:
    """A run in one process and the same one on the cluster, whose metrics are compared; returns the latter."""

    def executed(*assignments: str) -> Ran:
        folder = tmp_path_factory.mktemp("run")
        set_up(folder, model_dir("llama"))
        (folder / "own.py").write_text(OWN + WRITTEN)
        monkeypatch.chdir(folder)
        layers = [from_file(Path("slimectl.toml")), from_assignments([*SMALL, *assignments])]
        assert TrainingRun(resolve(layers).settings).execute("")
        return Ran(folder)

    def on_both(*assignments: str) -> Ran:
        local = executed(*assignments)
        on_ray = executed(*assignments, "cluster.executor=ray", f"cluster.ray_address={shared_cluster.address}")
        assert on_ray.told == local.told
        # Which of several servers answers a prompt is decided by who is free, and the last digits with it.
        if not any(assignment.startswith("engine.num_engines=") for assignment in assignments):
            assert on_ray.lines("runs/a/metrics.jsonl") == local.lines("runs/a/metrics.jsonl")
        return on_ray

    return on_both


@pytest.fixture(scope="module")
def plain_metrics() -> dict[str, Plain]:
    return {}


@pytest.fixture
def plain(run: Run, plain_metrics: dict[str, Plain]) -> Plain:
    """The metrics of the same run without a hook; made once."""
    if "plain" not in plain_metrics:
        plain_metrics["plain"] = run().metrics
    return plain_metrics["plain"]


def files_of_a_push_are_seen_before_engines_read_them(run: Run, plain: Plain) -> None:
    ran = run("sync.custom_post_write_path=own.py:written", "sync.transport=disk", "engine.num_engines=2")
    assert [line["engines"] for line in ran.told] == [2, 2]
    assert all("model.safetensors" in line["files"] for line in ran.told)


ON_RAY = EXAMPLES | {"sync.custom_post_write_path": files_of_a_push_are_seen_before_engines_read_them}


@pytest.mark.parametrize("setting", ON_RAY)
def test_a_hook_changes_the_same_on_a_cluster(setting: str, run: Run, plain: Plain):
    ON_RAY[setting](run, plain)


def test_every_hook_runs_on_a_cluster():
    assert set(ON_RAY) == set(HOOKS)
