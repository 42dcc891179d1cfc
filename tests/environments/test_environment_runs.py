"""Environments in the stages: a run that learns from episodes, its evaluation, its resume, and a rollout on a line."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from statistics import fmean, stdev

import pytest
from workshop import Workshop

pytestmark = pytest.mark.slow

GAMES = Path(__file__).parent / "games.py"
PLAY = ["--env", "python:games.py:Guess", "--data", "env@[:8]", "-s", "score.custom_rm_path=none"]
PLAY += ["-s", "rollout.env_turn_tokens=3", "-s", "rollout.env_max_turns=3", "-s", "rollout.max_response_len=200"]


@pytest.fixture
def games(workshop: Workshop) -> Workshop:
    """A workshop with the file of the games."""
    shutil.copy(GAMES, workshop.folder)
    return workshop


def test_a_run_learns_from_episodes_and_goes_on_after_kill_9(games: Workshop):
    held_out = "eval.data={held_out='env:eval@[:2]', small={path='prompts.jsonl@[0:1]', rm_type='exact'}}"
    words = ["run", *PLAY, "-s", held_out, "-s", "eval.interval=none", "-s", "run.num_rollout=2", "--name", "killed"]
    process = games.start(*words, "-s", "rollout.n_samples_per_prompt=2", "-s", "run.rollout_batch_size=2")
    metrics = games.folder / "runs" / "killed" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("train/grad_norm") < 1:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    games.slimectl("run", "--resume", "runs/killed")
    lines = [line["metrics"] for line in games.metrics("killed")]
    steps = [line for line in lines if "train/grad_norm" in line]
    assert [step["rollout/env/turns"] for step in steps] == [3.0] * 2
    assert [step["rollout/env/errors"] for step in steps] == [3.0] * 2
    assert {step["rollout/raw_reward"] for step in steps} == {0.5}
    kept = (games.folder / "runs" / "killed").glob("step_*/samples.jsonl")
    tasks = [json.loads(line)["metadata"]["env"]["task"] for path in kept for line in path.read_text().splitlines()]
    assert sorted(tasks) == [n for n in range(4) for _ in range(2)]
    measured = [line for line in lines if "eval/held_out_samples" in line]
    assert [line["eval/held_out"] for line in measured] == [0.5] * 2
    assert [line["eval/small"] for line in measured] == [0.0] * 2  # prompts that are no tasks are answered in one turn
    timings = (games.folder / "runs" / "killed" / "perf.jsonl").read_text()
    assert "perf/non_generation_time/mean" in timings


def test_turns_of_episodes_get_their_own_credit(games: Workshop):
    words = [
        "run",
        *PLAY,
        "-s",
        "rollout.n_samples_per_prompt=4",
        "-s",
        "run.rollout_batch_size=2",
        "-s",
        "run.num_rollout=1",
    ]
    words += [
        "-s",
        "eval.data={small={path='prompts.jsonl@[0:1]', rm_type='exact'}}",
        "-s",
        "algorithm.name=gigpo",
        "-s",
        "run.keep_samples=train",
        "--name",
        "credit",
    ]
    games.slimectl(*words)
    [step] = [line["metrics"] for line in games.metrics("credit") if "train/grad_norm" in line["metrics"]]
    # Every answer of the random model is invalid: all turns are in the first state. The end gives the last turn 0.5.
    assert [step[f"rollout/turn_reward/{number}"] for number in range(3)] == [0.0, 0.0, 0.5]
    assert step["rollout/state_groups"] == 2.0
    assert step["rollout/state_group_size/mean"] == 12.0
    [file] = (games.folder / "runs" / "credit").glob("step_*/train_data.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    # Returns 0.5 * 0.95^2, 0.5 * 0.95 and 0.5, the same in all four attempts; equal rewards of attempts add nothing.
    returns = [0.5 * 0.95**2, 0.5 * 0.95, 0.5] * 4
    expected = [(value - fmean(returns)) / (stdev(returns) + 1e-6) for value in returns[:3]]
    for row in rows:
        values = [value for value, bit in zip(row["advantages"], row["loss_mask"], strict=True) if bit]
        assert [*dict.fromkeys(values)] == pytest.approx(expected, rel=1e-5)
        assert not any(value for value, bit in zip(row["advantages"], row["loss_mask"], strict=True) if not bit)


def test_a_rollout_has_an_episode_for_each_sample_and_a_hanging_one_fails_alone(games: Workshop):
    output = games.slimectl("rollout", "-c", "slimectl.toml", *PLAY, "-n", "1", "--dry-run")
    assert b"rollout.env = python:games.py:Guess" in output
    trouble = ["--env", "python:games.py:Troubled", "--data", "env@[:2]", "-n", "1", "-s", "score.custom_rm_path=none"]
    trouble += ["-s", "rollout.env_args={log='log', first='hang', then='win'}", "-s", "rollout.env_timeout_s=8"]
    output = games.slimectl("rollout", "-c", "slimectl.toml", *trouble, "-s", "rollout.env_retries=0")
    samples = [json.loads(line) for line in output.splitlines()]
    assert {sample["status"] == "failed": sample["reward"] for sample in samples} == {True: None, False: 2.0}
    games.slimectl("rollout", "-c", "slimectl.toml", "--env", "python:games.py:No", code=2)
    assert games.stderr.count("\n") == 1
    assert "games.py has no such name: No" in games.stderr
