"""`slimectl runs` lists the runs of a folder with their state and last figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimectl.cli.app import app
from slimectl.data.run_dir import RunDir


def metrics_line(step: int) -> dict:
    metrics = {"rollout/step": step, "rollout/raw_reward": step / 10, "train/loss": -0.5}
    return {"step": 2 * step, "metrics": metrics | ({"eval/small_accuracy": 0.25} if step == 2 else {})}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run, one that goes on in this process, and one that was killed before its first round."""
    for number, name in enumerate(("finished", "running", "killed")):
        run = tmp_path / name
        run.mkdir()
        (run / "run.toml").write_text("[run]\nnum_rollout = 4\n")
        (run / "manifest.json").write_text(
            json.dumps({"slimectl": "0.2.0", "stage": "run", **({"finished": "x"} if name == "finished" else {})})
        )
        if name != "killed":
            lines = [metrics_line(step) for step in range(1, 5 if name == "finished" else 3)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half')
            os.utime(run / "metrics.jsonl", (1e9 + number, 1e9 + number))
    RunDir(tmp_path / "running").lock()
    return tmp_path


def test_runs_are_listed_with_state_rounds_and_last_figures(folder: Path):
    result = CliRunner().invoke(app, ["runs", str(folder), "--json"])
    listed = {Path(run["run"]).name: run for run in map(json.loads, result.stdout.splitlines())}
    assert {name: run["state"] for name, run in listed.items()} == {
        "finished": "finished", "running": "running", "killed": "stopped",
    }  # fmt: skip
    assert (listed["finished"]["rounds"], listed["finished"]["reward"]) == (4, 0.4)
    assert (listed["running"]["rounds"], listed["running"]["evaluations"]) == (2, {"eval/small_accuracy": 0.25})
    assert listed["killed"]["reward"] is None
    assert [*listed] == ["killed", "running", "finished"]  # the last changed first


def test_the_table_has_a_line_for_each(folder: Path):
    lines = CliRunner().invoke(app, ["runs", str(folder)]).stdout.splitlines()
    assert lines[0].split() == ["run", "state", "rounds", "reward", "evaluation", "loss", "changed"]
    assert lines[2].split()[1:6] == ["running", "2/4", "0.2", "small", "0.250"]
    assert lines[2].endswith("d ago")


def test_a_settings_file_named_run_toml_is_no_run(folder: Path):
    project = folder.parent / "project"
    project.mkdir()
    (project / "run.toml").write_text("[run]\nnum_rollout = 3\n")
    folder.rename(project / "runs")
    listed = map(json.loads, CliRunner().invoke(app, ["runs", str(project), "--json"]).stdout.splitlines())
    assert {Path(run["run"]).name for run in listed} == {"finished", "running", "killed"}
    assert CliRunner().invoke(app, ["inspect", str(project)]).stdout == f"{project}: run.toml, runs\n"


@pytest.mark.parametrize(("name", "reason"), [("nothing", "no such folder"), ("empty", "contains no runs")])
def test_a_folder_without_runs_is_one_line(tmp_path: Path, name: str, reason: str):
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["runs", str(tmp_path / name)])
    assert result.exit_code == 2
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1
