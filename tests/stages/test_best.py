"""The best evaluation, and early stop."""

from __future__ import annotations

import json
import os

import pytest
from workshop import Workshop

from slimectl.stages.best import Evaluations


def evaluations(*values: float, error: float = 0.0, name: str = "eval/words_accuracy") -> list[tuple[int, dict]]:
    """An evaluation before round 1 and after every second round."""
    return [(2 * i, {name: value, f"{name}_stderr": error}) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("name", "values", "best", "since"),
    [
        ("words_accuracy", (0.5, 0.9, 0.7, 0.9), (2, 0.9), 2),  # the first of equal ones
        ("eval/words_accuracy", (0.5, 0.6), (2, 0.6), 0),
        ("words/loss", (2.0, 1.5, 1.7), (2, 1.5), 1),  # a loss is better when it is lower
        ("words-truncated_ratio", (0.2, 0.1, 0.3), (2, 0.1), 1),
        ("words_accuracy", (float("nan"), 0.1), (2, 0.1), 0),
        ("words_accuracy", (), None, 0),
    ],
)
def test_the_best_evaluation(name: str, values: tuple[float, ...], best: tuple[int, float] | None, since: int):
    history = evaluations(*values, name="eval/" + name.removeprefix("eval/"))
    compared = Evaluations(name, history)
    assert (compared.best, compared.since_best) == (best, since)


SCHEDULED = '''
from pathlib import Path

REWARDS = [0.0, 1.0, 0.25, 0.25, 0.25]

def scheduled(sample):
    """The reward of each evaluation in turn: before training, and after rounds 2, 4, 6, …"""
    calls = Path("calls")
    count = calls.stat().st_size if calls.exists() else 0
    with calls.open("a") as file:
        file.write(".")
    return REWARDS[count]
'''
BEST = (
    "-s", 'eval.data={small={path="prompts.jsonl@[0:1]", custom_rm_path="scheduled.py:scheduled"}}',
    "-s", "run.save_best=small", "-s", "run.keep_checkpoints=1", "-s", "run.keep_samples=false",
)  # fmt: skip


def test_the_best_checkpoint_outlives_newer_ones_and_the_run_stops_early(workshop: Workshop):
    (workshop.folder / "scheduled.py").write_text(SCHEDULED)
    workshop.slimectl("run", *BEST, "-s", "run.early_stop_patience=2", "-s", "run.num_rollout=8")
    run = workshop.folder / "runs/a"
    assert sorted(path.name for path in run.glob("step_*")) == ["step_000002", "step_000006"]
    assert os.readlink(run / "best") == "step_000002"
    assert "stopped early after round 6: eval/small was best at round 2 (1), 2 evaluations ago" in workshop.stderr
    assert json.loads((run / "manifest.json").read_text())["counts"]["rounds"] == 6
    assert "best         step_000002: eval/small 1" in workshop.slimectl("inspect", "runs/a").decode()
    workshop.slimectl("rollout", "--model", "runs/a/best", "--data", "prompts.jsonl@[0:1]", "-n", "1", "-o", "b.jsonl")
    assert json.loads((workshop.folder / "b.jsonl").read_text())["weight_versions"] == ["2"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["run.save_best=smal_accuracy"], "run.save_best: 'smal_accuracy' is not a metric of an evaluation of small. "
                                          "Set it to small_accuracy or"),
        (["run.save_best=small_accuracy", "eval.interval=none"], "eval.interval is not set"),
        (["run.early_stop_patience=2"], "run.early_stop_patience needs run.save_best"),
    ],
)  # fmt: skip
def test_a_metric_that_no_evaluation_has_is_refused_before_the_run(workshop: Workshop, values: list[str], message: str):
    options = [option for value in values for option in ("-s", value)]
    for dry in ([], ["--dry-run"]):
        output = workshop.slimectl("run", *options, *dry, code=2).decode()
        assert message in " ".join((output + workshop.stderr).split())
    assert not (workshop.folder / "runs").exists()
