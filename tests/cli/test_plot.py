"""`slimectl inspect --plot`: curves of runs as files, with seeds as a mean and a band."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slimectl.cli import plot
from slimectl.cli.app import app
from slimectl.cli.viewer.library import Library


def run(folder: Path, rewards: dict[int, float], *, seed: int = 1, lr: float = 1e-3) -> Path:
    """A run with a reward at each step, an evaluation after the first, and steps of 2 s."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(f"[train]\nlr = {lr}\n[run]\nseed = {seed}\n")
    (folder / "manifest.json").write_text('{"slimectl": "0.2.0", "stage": "run"}')
    lines: list[dict[str, Any]] = [
        {"step": step, "rollout_id": step * 10, "metrics": {"rollout/raw_reward": value, "train/ppo_kl": 0.0}}
        for step, value in rewards.items()
    ]
    first = min(rewards)
    lines.append({"step": first, "rollout_id": first * 10, "metrics": {"eval/a_accuracy": 0.5, "eval/step": 1.0}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = [{"step": step, "metrics": {"perf/total_time": 2.0}} for step in rewards]
    (folder / "perf.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))
    return folder


def inspect(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert result.stdout == ""
    return result.exit_code, result.stderr


def test_the_band_is_one_standard_deviation_around_the_mean_at_each_x_of_the_longest_line():
    long, short = [(1, 1.0), (2, 2.0), (3, 5.0), (3, 7.0)], [(1, 3.0), (3, 4.0)]
    points, low, high = plot.mean_and_band([long, short, [(2, 8.0)]])
    # At 1: 1 and 3. At 2: 2, (3 + 4) / 2 and 8, deviation sqrt(((2.5)² + 1 + 3.5²) / 2). At 3: (5 + 7) / 2 and 4.
    assert points == [(1, 2.0), (2, 4.5), (3, 5.0)]
    deviations = [2**0.5, 9.75**0.5, 2**0.5]
    assert [y - below for (_, y), below in zip(points, low, strict=True)] == pytest.approx(deviations)
    assert [above - y for (_, y), above in zip(points, high, strict=True)] == pytest.approx(deviations)


def test_runs_that_differ_in_their_seed_are_one_line(tmp_path: Path):
    for name, seed, lr in (("g-s1", 1, 1e-3), ("g-s2", 2, 1e-3), ("other", 1, 1e-4)):
        run(tmp_path / name, {1: float(seed), 2: 3.0 * seed}, seed=seed, lr=lr)
    rewards, evaluations = plot.charts_of(list(Library([tmp_path]).runs.values()), axis="time")
    group, other = rewards.lines
    assert (rewards.metric, evaluations.metric) == ("rollout/raw_reward", "eval/a_accuracy")  # ppo_kl is always 0
    assert (group.label, group.points) == ("g (2 seeds)", [(2.0, 1.5), (4.0, 4.5)])
    assert group.low == pytest.approx([1.5 - 0.5**0.5, 4.5 - 4.5**0.5])
    assert (other.label, other.points, other.low) == ("other", [(2.0, 1.0), (4.0, 3.0)], None)
    assert evaluations.lines[1].points == [(2.0, 0.5)]


def test_metrics_are_chosen_by_a_part_of_their_name_and_values_that_are_not_finite_are_left_out(tmp_path: Path):
    folder = run(tmp_path / "a", {1: 1.0, 2: float("nan"), 3: float("inf")})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            '[1]\n{"step": 4}\n{"metrics": {}}\nnot JSON\n{"step": 5, "metrics": {"rollout/raw_reward": "high"}}\n'
        )
    charts = plot.charts_of(list(Library([folder]).runs.values()), metrics=["ppo", "raw_reward"], axis="round")
    assert [chart.title for chart in charts] == ["train/ppo_kl (nat)", "rollout/raw_reward"]
    assert charts[1].lines[0].points == [(10, 1.0)]


def test_the_same_values_give_the_same_picture_and_names_are_text(tmp_path: Path):
    runs = [
        run(tmp_path / name, {1: 0.0, 2: number}, lr=number)
        for number, name in enumerate(["_$x^$ <b>", "\x1b[31m$\u202e"], 1)
    ]
    for name in ("one.svg", "two.svg", "one.png"):
        assert inspect(*runs, "--plot", tmp_path / name) == (0, f"{tmp_path / name}: 2 charts of 2 runs\n")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert "_$x^$ &lt;b&gt;" in text
    assert "\u241b[31m$⟨RLO⟩" in text
    assert not {"\x1b", "\u202e", "<b>", "dc:date"} & {
        part for part in ("\x1b", "\u202e", "<b>", "dc:date") if part in text
    }
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, picture = run(tmp_path / "a", {1: 1.0}), tmp_path / "a.png"
    empty = run(tmp_path / "b", {1: 1.0})
    (empty / "metrics.jsonl").write_text("")
    samples = tmp_path / "samples.jsonl"
    samples.write_text("{}\n")
    taken = tmp_path / "taken.png"
    taken.write_text("mine")
    for arguments, problem in (
        ([folder, "--plot", tmp_path / "a.pdf"], "give a file that ends in .png or .svg"),
        ([folder, "--plot", picture, "--metric", "nothing"], "no metric of these runs contains 'nothing'"),
        ([folder, "--plot", picture, "--axis", "week"], "'week' is unknown. Choose one of step, round, time"),
        ([folder, "--plot", taken], "already exists. Add --force to replace it"),
        ([folder, "--metric", "reward"], "Add --plot FILE.png"),
        ([empty, "--plot", picture], "has no metrics to draw yet"),
        ([samples, "--plot", picture], "samples.jsonl: not a run"),
        ([folder, "--plot", tmp_path / "none" / "a.png"], "none/a.png: No such file or directory"),
    ):
        code, message = inspect(*arguments)
        assert (code > 0, problem in message, message.count("\n")) == (True, True, 1), message
    assert taken.read_text() == "mine"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, message = inspect(folder, "--plot", picture)
    assert (code, message.partition("Run: ")[2]) == (4, "pip install 'slimectl[plot]'\n")
