"""The curves of a run that was killed and resumed are those of an undisturbed one, point by point."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from workshop import Workshop

pytestmark = pytest.mark.slow

TRACKED = ("-s", "track.with=['tensorboard', 'jsonl']", "-s", "run.num_rollout=5", "-s", "run.save_interval=2")
STEPS = ("-s", "train.num_steps_per_rollout=2")
TIMES = ("perf/", "time/", "system/", "generation_time", "samples_per_second")
"""Metrics that a clock decides: their steps are the same."""

Curves = dict[str, list[tuple[int, float]]]


def curves(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    tags = read.Tags()
    points = {name: [(point.step, point.value) for point in read.Scalars(name)] for name in tags["scalars"]}
    return points | {name: [(point.step, 0.0) for point in read.Tensors(name)] for name in tags["tensors"]}


def lines_of(folder: Path) -> Curves:
    points: Curves = {}
    for line in map(json.loads, (folder / "tracked.jsonl").read_text().splitlines()):
        for name, value in line["metrics"].items():
            points.setdefault(name, []).append((line["step"], value))
    return points


def without_times(points: Curves) -> Curves:
    return {
        name: [(step, 0.0 if any(word in name for word in TIMES) else value) for step, value in curve]
        for name, curve in points.items()
    }


def kill_after(workshop: Workshop, lines: int, *command: str) -> None:
    """Kill a run once its metrics have so many lines."""
    metrics = workshop.folder / "runs" / "a" / "metrics.jsonl"
    process = workshop.start(*command, stderr=subprocess.DEVNULL)
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= lines):
        time.sleep(0.002)
        assert process.poll() is None
    process.kill()
    process.wait()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_curves_of_a_killed_and_resumed_run_are_those_of_an_undisturbed_one(workshop: Workshop, elsewhere: bool):
    place, steps = (("-s", "track.kwargs.tensorboard.log_dir='events'"), ()) if elsewhere else ((), STEPS)
    workshop.slimectl("run", *TRACKED, *steps, "--name", "whole", *place)
    runs = workshop.folder / "runs"
    whole = runs / "whole" / "tensorboard"
    if elsewhere:
        whole = (workshop.folder / "events").rename(workshop.folder / "events of the whole")
    kill_after(workshop, 5, "run", *TRACKED, *steps, *place)
    kill_after(workshop, 7, "run", "--resume", "runs/a")
    workshop.slimectl("run", "--resume", "runs/a")
    resumed = workshop.folder / "events" if elsewhere else runs / "a" / "tensorboard"
    expected, seen = without_times(curves(whole)), without_times(curves(resumed))
    assert expected["train/lr"][-1][0] == (5 if elsewhere else 10)
    assert seen == expected
    assert without_times(lines_of(runs / "a")) == without_times(lines_of(runs / "whole"))
