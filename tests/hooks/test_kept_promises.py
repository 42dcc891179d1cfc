"""Hooks change neither what a resume nor what a pipe promises."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workshop import Workshop, set_up

from slimectl.runtime.run import TrainingRun
from slimectl.settings.layers import from_assignments, from_file
from slimectl.settings.loading import resolve

pytestmark = pytest.mark.slow

OWN = """
import json, random
from pathlib import Path
from slimectl.types import Sample

class Drawn:
    '''Draws words, and never says where it is but by what it saves.'''
    def __init__(self, args):
        self.n, self.rng = args.rollout.n_samples_per_prompt, random.Random(args.rollout_seed)
    def get_samples(self, n):
        return [[Sample(prompt=f"say {self.rng.choice('abcdefghij')}") for _ in range(self.n)] for _ in range(n)]
    def add_samples(self, groups):
        raise NotImplementedError
    def save(self, rollout_id):
        return self.rng.getstate()
    def load(self, rollout_id, state):
        version, numbers, gauss = state
        self.rng.setstate((version, tuple(numbers), gauss))
    def __len__(self):
        return 10

class Filed(Drawn):
    '''As older scripts do it: a file a round, of its own.'''
    def save(self, rollout_id):
        Path(f"source-{rollout_id}.json").write_text(json.dumps(self.rng.getstate()))
    def load(self, rollout_id=None):
        super().load(rollout_id, json.loads(Path(f"source-{rollout_id}.json").read_text()))

async def one_too_many(args, rollout_id, data_source, attempt):
    '''Draws a group more than it needs, and gives the last one back as it was.'''
    groups = data_source.get_samples(args.run.rollout_batch_size + 1)
    data_source.add_samples(groups[-1:])
    return [await attempt(group) for group in groups[:-1]]

def marked(sample, rollout_id):
    sample.metadata["round"] = rollout_id

def drop_longest(args, data):
    for group in data:
        max(group, key=lambda sample: (len(set(sample.tokens)), sample.index)).remove_sample = True

def halves(args, samples):
    rewards = [sample.reward for sample in samples]
    return rewards, [reward - 0.5 for reward in rewards]

def centred(args, rollout_id, rollout_data):
    for row in rollout_data["advantages"]:
        row[:] = [a / rollout_id for a in row]
"""
SOURCE = ("rollout.data_source_path=own.py:Drawn", "rollout.data=[]", "eval.interval=none")
ROWS = (
    "rollout.sample_hook_path=['own.py:marked']",
    "rollout.sample_filter_path=own.py:drop_longest",
    "score.custom_reward_post_process_path=own.py:halves",
    "rollout.data_postprocess_path=own.py:centred",
)


def words(assignments: tuple[str, ...]) -> list[str]:
    return [word for each in assignments for word in ("-s", each)]


def killed_in(workshop: Workshop, run: str, arguments: list[str], *, lines: int) -> None:
    """Start a run and kill -9 it once it has written so many lines of metrics."""
    process = workshop.start(*arguments, stderr=subprocess.DEVNULL)
    metrics = workshop.folder / "runs" / run / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= lines):
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    process.wait()


def test_a_killed_run_goes_on_where_its_data_source_was(workshop: Workshop):
    (workshop.folder / "own.py").write_text(OWN)
    short = (*SOURCE, "run.num_rollout=4")
    workshop.slimectl("run", "--name", "whole", *words(short))
    killed_in(workshop, "broken", ["run", "--name", "broken", *words(short)], lines=2)
    workshop.slimectl("run", "--resume", "runs/broken")
    whole, broken = (workshop.folder / "runs" / name for name in ("whole", "broken"))
    assert (broken / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    last = Path("step_000004") / "policy" / "model.safetensors"
    assert (broken / last).read_bytes() == (whole / last).read_bytes()
    prompts = [json.loads(line)["prompt"] for line in (whole / "step_000004" / "samples.jsonl").open()]
    assert len(set(prompts)) > 1


Here = Callable[..., TrainingRun]


@pytest.fixture
def here(tmp_path: Path, model_dir: Callable[..., Path], monkeypatch: Any) -> Here:
    """A run in this process, by name and assignments."""
    set_up(tmp_path, model_dir("llama"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)

    def job(name: str, *assignments: str, **how: Any) -> TrainingRun:
        short = ("eval.interval=none", "eval.before_train=false", f"run.name={name}", *assignments)
        return TrainingRun(resolve([from_file(Path("slimectl.toml")), from_assignments(short)]).settings, **how)

    return job


def steps(name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/step" in line["metrics"]]


@pytest.mark.parametrize("hook", ["data_source_path=own.py:Filed", "function_path=own.py:one_too_many"])
def test_files_of_its_own_and_groups_given_back_outlive_a_stop(hook: str, here: Here):
    hooks = (f"rollout.{hook}", "run.num_rollout=3")
    assert here("whole", *hooks).execute()
    asked: list[int] = []
    assert not here("broken", *hooks, interrupted=lambda: bool(asked.append(1) or len(asked) == 2)).execute()
    Path("source-3.json").unlink(missing_ok=True)
    assert here("broken", *hooks).execute(resume=True)
    assert Path("runs/broken/metrics.jsonl").read_bytes() == Path("runs/whole/metrics.jsonl").read_bytes()


def test_pipe_equals_run_and_replay_equals_run_with_hooks(workshop: Workshop):
    (workshop.folder / "own.py").write_text(OWN)
    hooks = words((*SOURCE, *ROWS, "run.num_rollout=2", "run.num_epoch=none", "train.lr_decay_iters=6"))
    workshop.slimectl("run", *hooks)
    done = [line for line in workshop.metrics("a") if "train/step" in line["metrics"]]
    runs = workshop.folder / "runs" / "a"
    kept = [json.loads(line) for line in (runs / "step_000002" / "samples.jsonl").open()]
    assert {sample["metadata"]["round"] for sample in kept} == {2}
    assert sum(sample.get("remove_sample", False) for sample in kept) == 4

    sampled = workshop.slimectl("rollout", "-c", "slimectl.toml", *hooks)
    first = b"".join(sampled.splitlines(keepends=True)[:16])
    scored = workshop.slimectl("score", "-", "-c", "slimectl.toml", *hooks, stdin=first)
    trained = workshop.slimectl("train", "-", "-c", "slimectl.toml", *hooks, stdin=scored)
    assert json.loads(trained) == done[0]

    samples, before = runs / "step_000002" / "samples.jsonl", runs / "step_000001"
    replayed = workshop.slimectl("train", str(samples), "-c", str(runs / "run.toml"), "--load", str(before))
    assert json.loads(replayed) == done[1]


TENSOR = ("cluster.actor_num_gpus_per_node=2", "megatron.tensor_model_parallel_size=2")


@pytest.mark.parametrize("layout", [(), TENSOR], ids=["one", "tensor"])
def test_a_loss_of_logits_is_the_same_whoever_computes_them(layout: tuple[str, ...], here: Here):
    Path("own.py").write_text(
        "def own(args, batch, logits, sum_of_sample_mean):\n"
        "    chosen = logits.gather(1, batch.targets_T[:, None])[:, 0] - logits.logsumexp(1)\n"
        "    return sum_of_sample_mean(-batch.advantages_T * chosen), {}\n"
    )
    hooks = ("train.custom_loss_function_path=own.py:own", "run.num_rollout=1")
    assert here("one", *hooks).execute()
    assert here("two", *hooks, "train.backend=megatron", *layout).execute()
    (one,), (two,) = steps("one"), steps("two")
    assert two["metrics"]["train/grad_norm"] == pytest.approx(one["metrics"]["train/grad_norm"], rel=1e-4)


def test_two_ranks_with_hooks_of_the_loss_equal_one(here: Here):
    Path("own.py").write_text(
        "def half(pg_loss, loss_masks, total_lengths, response_lengths):\n"
        "    assert len(total_lengths) == len(response_lengths) == len(loss_masks)\n"
        "    return pg_loss / 2, loss_masks, {}\n"
        "def by_sequence(response_lengths, loss_masks):\n"
        "    cut = lambda loss: zip(loss.split(response_lengths), loss_masks)\n"
        "    return lambda loss: sum((part * mask).sum() / len(part) for part, mask in cut(loss))\n"
    )
    hooks = ("train.custom_tis_function_path=own.py:half", "run.num_rollout=1",
             "train.custom_pg_loss_reducer_function_path=own.py:by_sequence")  # fmt: skip
    assert here("one", *hooks).execute()
    assert here("two", *hooks, "cluster.actor_num_gpus_per_node=2").execute()
    (one,), (two,) = steps("one"), steps("two")
    for name in ("train/loss", "train/pg_loss", "train/grad_norm"):
        assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-5, abs=1e-7), name
