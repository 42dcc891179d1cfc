"""Every hook acts on a Ray cluster as it does in one process: the functions of the examples, several in each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from test_examples import OWN, SMALL, Ran
from workshop import set_up

from slimectl.executors.ray import RayExecutor
from slimectl.hooks import HOOKS
from slimectl.runtime.run import TrainingRun
from slimectl.settings.layers import from_assignments, from_file
from slimectl.settings.loading import resolve

TELLING = """
import functools, inspect

def written(args, version_dir, rollout_engines):
    names = sorted(file.name for file in version_dir.iterdir())
    tell(version=version_dir.name, files=names, engines=len(rollout_engines.urls))

def telling(function):
    def call(*args, **keywords):
        tell(call=function.__name__)
        return function(*args, **keywords)

    async def call_and_wait(*args, **keywords):
        return await call(*args, **keywords)

    return functools.wraps(function)(call_and_wait if inspect.iscoroutinefunction(function) else call)

Counting.get_samples = telling(Counting.get_samples)
for name, value in list(globals().items()):
    if inspect.isfunction(value) and name not in ("tell", "telling", "centred"):
        globals()[name] = telling(value)
"""
"""Lets every function of own.py write down that it is called, in whichever process."""

IN_A_ROUND = {
    "rollout.data_source_path": "get_samples",
    "rollout.custom_generate_function_path": "in_a_group",
    "rollout.sample_hook_path": "marked",
    "rollout.dynamic_sampling_filter_path": "not_the_first",
    "rollout.buffer_filter_path": "newest_first",
    "rollout.all_samples_process_path": "count_all",
    "rollout.sample_filter_path": "drop_odd",
    "rollout.data_postprocess_path": "half_advantages",
    "score.custom_rm_path": "small_bytes",
    "score.custom_reward_post_process_path": "thrice",
    "train.custom_tis_function_path": "half_weights",
    "track.custom_rollout_log_function_path": "no_default_log",
    "track.custom_eval_rollout_log_function_path": "one_more_number",
}
FOR_A_ROUND = {
    "rollout.function_path": "whole_round",
    "train.custom_convert_samples_to_train_data_path": "doubled_rewards",
    "train.custom_advantage_function_path": "double_advantages",
    "train.custom_loss_function_path": "triple_reinforce",
}
OF_MEGATRON = {
    "train.custom_pg_loss_reducer_function_path": "four_times_the_mean",
    "megatron.custom_model_provider_path": "louder",
    "megatron.custom_init_path": "begin",
    "megatron.custom_before_log_prob_hook_path": "before_log_prob",
    "megatron.custom_before_train_step_hook_path": "before_step",
}
OF_SERVERS = {"sync.custom_post_write_path": "written"}
OPTIONS: tuple[tuple[dict[str, str], tuple[str, ...]], ...] = (
    (
        IN_A_ROUND,
        ("rollout.data=[]", "rollout.over_sampling_batch_size=4", "run.num_rollout=2", "eval.interval=1"),
    ),
    (FOR_A_ROUND, ()),
    (OF_MEGATRON, ("train.backend=megatron", "algorithm.kl_loss_coef=0.1", "train.num_steps_per_rollout=2")),
    (OF_SERVERS, ("sync.transport=disk", "engine.num_engines=2")),
)
"""Hooks that act in one run side by side, by their functions in own.py, and the further settings of that run."""


@pytest.fixture(scope="module", autouse=True)
def joined(shared_cluster: Any) -> Iterator[None]:
    """This process joins the cluster once, for all runs of these tests."""
    first = RayExecutor(shared_cluster.address)
    yield
    first.close()


def executed(folder: Path, model: Path, *assignments: str) -> Ran:
    set_up(folder, model)
    (folder / "own.py").write_text(OWN + TELLING)
    layers = [from_file(Path("slimectl.toml")), from_assignments([*SMALL, *assignments])]
    assert TrainingRun(resolve(layers).settings).execute()
    return Ran(folder)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(("hooks", "options"), OPTIONS, ids=["in a round", "for a round", "of Megatron", "of servers"])
def test_hooks_act_on_a_cluster_as_here(
    hooks: dict[str, str],
    options: tuple[str, ...],
    tmp_path: Path,
    model_dir: Callable[..., Path],
    monkeypatch: Any,
    shared_cluster: Any,
):
    cluster = ("cluster.executor=ray", f"cluster.ray_address={shared_cluster.address}")
    classes = {"get_samples": "Counting"}
    paths = [f"{setting}=own.py:{classes.get(name, name)}" for setting, name in hooks.items()]
    runs = []
    for place, others in (("here", ()), ("there", cluster)):
        folder = tmp_path / place
        folder.mkdir()
        monkeypatch.chdir(folder)
        runs.append(executed(folder, model_dir("llama"), *options, *paths, *others))
    here, there = runs
    assert sorted(map(str, there.told)) == sorted(map(str, here.told))
    assert {line["call"] for line in there.told if "call" in line} >= set(hooks.values())
    # Which of several servers answers a prompt is decided by who is free, and the last digits with it.
    if hooks is not OF_SERVERS:
        assert there.lines("runs/a/metrics.jsonl") == here.lines("runs/a/metrics.jsonl")
        assert there.samples() == here.samples()
    else:
        pushes = [line for line in there.told if "files" in line]
        assert [line["engines"] for line in pushes] == [2, 2]
        assert all("model.safetensors" in line["files"] for line in pushes)


def test_every_hook_runs_on_a_cluster():
    assert {setting for hooks, _ in OPTIONS for setting in hooks} == set(HOOKS)
