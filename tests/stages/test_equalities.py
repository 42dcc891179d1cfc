"""A stage in a pipe, in a replay and in a run is one function: the same numbers to the last digit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from workshop import Workshop

pytestmark = pytest.mark.slow


def without_eval(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "train/step" in line["metrics"]]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_pipe_equals_run_and_replay_equals_run(workshop: Workshop):
    workshop.slimectl("run")
    steps = without_eval(workshop.metrics("a"))
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    runs = workshop.folder / "runs" / "a"

    # pipe = run: the first round by hand
    sampled = workshop.slimectl("rollout", "-c", "slimectl.toml", "--data", "prompts.jsonl@[0:4]")
    scored = workshop.slimectl("score", "-", "-c", "slimectl.toml", stdin=sampled)
    trained = workshop.slimectl("train", "-", "-c", "slimectl.toml", "--save", "piped", stdin=scored)
    assert json.loads(trained) == steps[0]
    assert weights(workshop.folder / "piped") == weights(runs / "step_000001" / "policy")

    # replay = run: any kept step again from its files
    for number in (2, 6):
        samples, before = runs / f"step_{number:06d}" / "samples.jsonl", runs / f"step_{number - 1:06d}"
        replayed = workshop.slimectl(
            "train", str(samples), "-c", str(runs / "run.toml"), "--load", str(before), "--save", f"again{number}"
        )
        assert json.loads(replayed) == steps[number - 1]
        assert weights(workshop.folder / f"again{number}") == weights(runs / f"step_{number:06d}" / "policy")


def test_two_ranks_equal_one(workshop: Workshop):
    workshop.slimectl("run", "-s", "run.num_rollout=2", "--name", "one")
    workshop.slimectl("run", "-s", "run.num_rollout=2", "--name", "two", "-s", "cluster.actor_num_gpus_per_node=2")
    one, two = without_eval(workshop.metrics("one")), without_eval(workshop.metrics("two"))
    for mine, theirs in zip(one, two, strict=True):
        for name in ("train/loss", "train/grad_norm"):
            a, b = mine["metrics"][name], theirs["metrics"][name]
            assert abs(a - b) <= 1e-6 * max(1.0, abs(a)), name
        assert mine["metrics"]["rollout/raw_reward"] == theirs["metrics"]["rollout/raw_reward"]


def test_several_steps_a_round_and_left_over_rollouts_lose_nothing(workshop: Workshop):
    workshop.slimectl("run", "-s", "run.num_rollout=2", "-s", "train.global_batch_size=6")
    steps = without_eval(workshop.metrics("a"))
    # 16 rollouts a round: 6 + 6, 4 left over; then 4 + 16 = 6 + 6 + 6, 2 left over; then those 2.
    assert [line["metrics"]["train/global_batch_size"] for line in steps] == [6, 6, 6, 6, 6, 2]
    assert [line["metrics"].get("train/rollouts_left_over") for line in steps] == [4, 4, 2, 2, 2, None]


def test_working_ahead_is_never_staler_than_asked(workshop: Workshop):
    workshop.slimectl("run", "-s", "run.async_level=2", "-s", "run.max_staleness=2")
    stale = [line["metrics"]["rollout/staleness/max"] for line in without_eval(workshop.metrics("a"))]
    assert stale[0] == 0
    assert max(stale) in (1, 2)
    workshop.slimectl("run", "--name", "b")
    assert {line["metrics"]["rollout/staleness/max"] for line in without_eval(workshop.metrics("b"))} == {0}


def test_a_new_model_is_its_own_reference(workshop: Workshop):
    """The divergence from the start is 0 at the first step and grows from there, whatever the model came from."""
    settings = (workshop.folder / "slimectl.toml").read_text().replace(f'path = "{workshop.model}"', 'card = "tiny"')
    (workshop.folder / "slimectl.toml").write_text(settings)
    workshop.slimectl("run", "-s", "algorithm.kl_loss_coef=0.1", "-s", "run.num_rollout=2")
    first, second = (line["metrics"]["train/kl_loss"] for line in without_eval(workshop.metrics("a")))
    assert abs(first) < 1e-6 < second


def test_training_goes_on_from_what_train_saved(workshop: Workshop):
    workshop.slimectl("rollout", "-c", "slimectl.toml", "--out", "sampled.jsonl")
    workshop.slimectl("score", "sampled.jsonl", "-c", "slimectl.toml", "--out", "scored.jsonl")
    train = ("train", "scored.jsonl", "-c", "slimectl.toml")
    workshop.slimectl(*train, "--save", "once")
    lines = workshop.slimectl(*train, "--load", "once").decode().splitlines()
    # 32 samples are two rounds of 16; the schedule and the versions go on after the two steps of the first time.
    assert [json.loads(line)["weight_version"] for line in lines] == ["3", "4"]
    assert [json.loads(line)["step"] for line in lines] == [3, 4]
    assert json.loads(lines[0])["metrics"]["train/lr"] < 1e-3
    shutil.copytree(workshop.folder / "once", workshop.folder / "damaged")
    optimizer = workshop.folder / "damaged" / "trainer" / "optimizer.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:-1] + b"\x7f")
    workshop.slimectl(*train, "--load", "damaged", code=1)
    assert "damaged: trainer/optimizer.safetensors does not match its checksum" in workshop.stderr
    workshop.slimectl(*train, "--load", "once", "--model", str(workshop.model), code=2)
    assert workshop.stderr.startswith("slimectl: --model starts from weights only")
