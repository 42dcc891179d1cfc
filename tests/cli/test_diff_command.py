"""`slimectl diff` and `slimectl inspect A B`: settings, curves and the first step of two runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimectl.cli.app import app

MANIFEST = {"slimectl": "0", "stage": "run", "finished": "2026-01-01T00:00:00Z"}


def slimectl(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


def write_run(folder: Path, lr: float, rewards: list[float], accuracy: float) -> None:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    (folder / "run.toml").write_text(f'[train]\nlr = {lr}\n[run]\nname = "{folder.name}"\nnum_rollout = 3\n')
    lines = [
        {"step": i, "rollout_id": i, "weight_version": str(i), "metrics": {"rollout/raw_reward": reward}}
        for i, reward in enumerate(rewards, 1)
    ]
    lines.append({"step": 3, "rollout_id": 3, "weight_version": "3", "metrics": {"eval/small_accuracy": accuracy}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    perf = {"step": 1, "metrics": {"perf/total_time": lr * 1e6}}  # differs between any two runs
    (folder / "perf.jsonl").write_text(json.dumps(perf) + "\n")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/a"), 1e-6, [0.25, 0.5, 0.5], 0.5)
    write_run(Path("runs/b"), 1e-5, [0.25, 0.75, 1.0], 0.875)
    write_run(Path("runs/c"), 1e-6, [0.25, 0.5, 0.5], 0.5)


@pytest.mark.usefixtures("runs")
def test_two_runs_differ_in_settings_curves_and_from_a_step_on():
    code, out, _ = slimectl("diff", "runs/a", "runs/b")
    lines = out.splitlines()
    assert (code, lines[:3]) == (0, ["runs/a  ->  runs/b", "settings that differ: 1", "  train.lr  1e-06  ->  1e-05"])
    assert lines[3].split() == ["reward", "0.5", "->", "1", "+0.5", "▁██", "▁▆█"]  # 0.75 is 2/3 of 0.25 to 1: ▆
    assert lines[4].split()[:5] == ["small_accuracy", "0.5", "->", "0.875", "+0.375"]
    assert lines[5:] == ["metrics first differ at step 2, in 1 metric", "  rollout/raw_reward  0.5  ->  0.75"]
    assert slimectl("inspect", "runs/a", "runs/b") == (0, out, "")


@pytest.mark.usefixtures("runs")
def test_equal_runs_and_json():
    assert slimectl("diff", "runs/a", "runs/c")[1].splitlines()[-1] == "metrics are equal at every step"
    facts = json.loads(slimectl("diff", "runs/a", "runs/b", "--json")[1])
    assert facts["settings"] == {"train.lr": [1e-06, 1e-05]}
    assert facts["curves"] == {"reward": [[0.25, 0.5, 0.5], [0.25, 0.75, 1.0]], "small_accuracy": [[0.5], [0.875]]}
    assert facts["first_difference"] == {"step": 2, "metrics": {"rollout/raw_reward": [0.5, 0.75]}}


@pytest.mark.usefixtures("runs")
def test_what_cannot_be_compared_is_one_line():
    Path("s.jsonl").write_text("{}\n")
    Path("project").mkdir()
    Path("project/run.toml").write_text("[train]\nlr = 1\n")  # settings, not a run
    for words, line in (
        (("diff", "runs/a", "s.jsonl"), "runs/a and s.jsonl: one is a run and the other is not. Compare two runs"),
        (("diff", "runs/a", "project"), "runs/a and project: one is a run and the other is not. Compare two runs"),
        (("diff", "runs/a", "runs/z"), "runs/z: no such file or folder"),
        (("inspect", "runs/a", "runs/b", "--explain"), "runs/b: only one path can be shown at a time"),
    ):
        code, _, err = slimectl(*words)
        assert (code, line in err) == (2, True), err
