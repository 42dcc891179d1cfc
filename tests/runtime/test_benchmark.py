"""CPU seconds to a target: what is counted, by hand and in a whole run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from workshop import SETTINGS, Workshop

from slimectl.errors import BackendError, SettingsError, SlimectlError
from slimectl.recipes import benchmark
from slimectl.runtime.benchmark import (
    PhaseClock,
    TimedAccuracy,
    check_prompts,
    collect,
    model_values,
    run_to_target,
    running_children_s,
)

TABLE = """
[benchmark]
name = "tiny"
dataset = "small"
accuracy = {accuracy}
seeds = [5]
"""


def write_task(workshop: Workshop, *, accuracy: float = 1.0, more: str = "") -> benchmark.BenchmarkTask:
    """A task of the workshop's run, two rounds long."""
    settings = SETTINGS.format(model=workshop.model).replace("num_rollout = 6", "num_rollout = 2")
    file = workshop.folder / "tiny.toml"
    file.write_text(settings.replace("interval = 2", f"interval = 1\n{more}") + TABLE.format(accuracy=accuracy))
    return benchmark.load(str(file))


def test_a_phase_has_what_passes_in_it_and_an_evaluation_all_that_is_inside():
    process, tree = iter([1.0, 3.0, 4.0, 9.0, 9.5, 11.0]), iter([20.0, 25.0, 26.0, 50.0, 60.0, 61.0, 70.0])
    clock = PhaseClock(lambda: next(process), lambda: next(tree))
    with clock.phase("loading"):  # 1 until here, then 2
        pass
    with clock.phase("evaluating"):  # 1 between, 5 in it; 5 of all processes
        pass
    with clock.phase("evaluating small"):  # 0.5 between, 1.5 in it; 24 of all processes
        pass
    assert dict(clock.seconds) == {"start": 1.0, "loading": 2.0, "other": 1.5, "evaluating": 6.5}
    assert clock.take_evaluations() == [20.0]
    assert clock.take_evaluations() == []
    assert clock.evaluation_s == 29.0
    assert clock.counted() == 60.0 - 29.0


def test_processes_below_one_are_counted_with_those_that_they_have_waited_for(tmp_path: Path):
    def process(number: int, parent: int, *ticks: int) -> None:
        (tmp_path / str(number)).mkdir()
        fields = ["S", str(parent), *["0"] * 9, *map(str, ticks), "20"]
        (tmp_path / str(number) / "stat").write_text(f"{number} (a) b (c) {' '.join(fields)}\n")

    process(10, 1, 1000, 1000, 1000, 1000)
    process(11, 10, 1, 2, 30, 40)
    process(12, 11, 500, 0, 0, 0)
    process(13, 1, 1000, 0, 0, 0)
    (tmp_path / "14").mkdir()  # ended while the folder was read
    assert running_children_s(10, tmp_path) == 573 / os.sysconf("SC_CLK_TCK")


LINES = [
    {"round": 0, "accuracy": 0.25, "cpu_s": 6.0},
    {"round": 10, "accuracy": 0.5, "cpu_s": 8.0},
    {"total_cpu_s": 9.0, "evaluation_cpu_s": 2.0, "phases_cpu_s": {"train": 3.0}},
]


def test_a_result_is_that_of_the_evaluation_that_reached_the_target_or_of_the_whole_run():
    shown: list[TimedAccuracy] = []
    reached = collect(iter(LINES), seed=3, accuracy=0.5, on_evaluation=shown.append)
    assert reached is not None
    assert (reached.reached, reached.round, reached.accuracy, reached.cpu_s) == (True, 10, 0.5, 8.0)
    assert reached.evaluations == shown == [TimedAccuracy(0, 0.25, 6.0), TimedAccuracy(10, 0.5, 8.0)]
    missed = collect(iter(LINES), seed=3, accuracy=0.75)
    assert missed is not None
    assert (missed.reached, missed.round, missed.accuracy, missed.cpu_s) == (False, 10, 0.5, 9.0)


def test_lines_that_break_off_are_no_result_and_an_error_is_raised_with_its_exit_code():
    assert collect(iter(LINES[:2]), seed=3, accuracy=0.5) is None
    with pytest.raises(SlimectlError, match="no disk") as raised:
        collect(iter([LINES[0], {"error": "no disk", "exit_code": 4}]), seed=3, accuracy=0.5)
    assert raised.value.exit_code == 4


def test_a_run_ends_at_its_target_and_counts_what_came_before(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workshop.folder)
    task = write_task(workshop, accuracy=0.5, more="success_threshold = 0.0")  # any answer is right
    values = {"run.name": "tiny-1", "run.seed": 5, "track.with": []}
    evaluation, totals = run_to_target(task, values)
    assert (evaluation["round"], evaluation["accuracy"]) == (0, 1.0)
    assert 0 < evaluation["cpu_s"] <= totals["total_cpu_s"]
    assert totals["evaluation_cpu_s"] > 0
    assert {"start", "loading", "evaluating"} <= totals["phases_cpu_s"].keys()
    ticks = 2 * 0.01  # one clock counts hundredths of a second, the other nanoseconds
    assert totals["phases_cpu_s"]["evaluating"] <= totals["evaluation_cpu_s"] + ticks
    # The first evaluation is seen with the first round, which is made and not the second.
    evaluations = [line["rollout_id"] for line in workshop.metrics("tiny-1") if "eval/step" in line["metrics"]]
    assert evaluations == [0, 1]


def test_a_gguf_of_a_package_that_is_missing_is_one_line(workshop: Workshop):
    task = write_task(workshop)
    assert model_values(task, None, workshop.folder) == {"model.path": str(workshop.model)}
    with pytest.raises(BackendError, match=r"package:no_such_model: the package no_such_model is not installed"):
        model_values(task, "package:no_such_model", workshop.folder)


def test_other_prompts_than_those_of_the_task_are_refused(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workshop.folder)
    check_prompts(write_task(workshop))
    task = write_task(workshop)
    other = task.target.model_copy(update={"prompts_sha256": "0" * 64})
    with pytest.raises(SettingsError, match=r"tiny 1: prompts\.jsonl@\[0:3\] has different prompts than the task"):
        check_prompts(benchmark.BenchmarkTask(other, task.layer))
