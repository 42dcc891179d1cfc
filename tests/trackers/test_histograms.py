"""Histograms of a round's rewards, as the trackers that draw them keep them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked import wandb_rows
from trackers.test_resumed_curves import kill_after
from workshop import Workshop

from slimectl.runtime import builders
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve

REWARDS = [0.0, 0.0, 0.25, 1.0, 1.0, 1.0]
COUNTS = [2, 0, 1, 0, 0, 0, 0, 0, 0, 3]
"""Of ten bins from 0 to 1."""


def log_to(tracker: str, folder: Path, *assignments: str) -> None:
    layers = [from_assignments(["run.name=a", f"track.with=['{tracker}']", *assignments])]
    trackers = builders.start_trackers(resolve(layers).settings, folder)
    builders.log_rewards(trackers, REWARDS, step=3)
    builders.log_rewards(trackers, [], step=4)
    for each in trackers:
        each.close()


def bins_of_wandb(folder: Path) -> list[tuple[float, dict[str, Any]]]:
    rows = [row for row in wandb_rows(folder) if row.get("rollout/reward_histogram/_type") == "histogram"]
    name = "rollout/reward_histogram"
    return [(row["rollout/step"], {key: row[f"{name}/{key}"] for key in ("values", "bins")}) for row in rows]


def test_wandb_gets_a_histogram_on_the_axis_of_rounds(tmp_path: Path):
    log_to("wandb", tmp_path, "track.mode=offline")
    [(step, histogram)] = bins_of_wandb(tmp_path)
    counts, edges = np.histogram(REWARDS, bins=64)
    assert step == 3
    assert histogram["values"] == counts.tolist()
    assert histogram["bins"] == pytest.approx(edges.tolist())


def test_tensorboard_gets_a_histogram(tmp_path: Path):
    log_to("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    [event] = events.Histograms("rollout/reward_histogram")
    histogram = event.histogram_value
    assert (event.step, histogram.num, histogram.min, histogram.max) == (3, 6.0, 0.0, 1.0)
    assert sum(histogram.bucket) == 6.0


def test_json_lines_have_counts_and_edges(tmp_path: Path):
    log_to("jsonl", tmp_path)
    [line] = map(json.loads, (tmp_path / "tracked.jsonl").read_text().splitlines())
    assert line["edges"] == pytest.approx([i / 10 for i in range(11)])
    assert line | {"edges": []} == {
        "step": 3, "metrics": {}, "histogram": "rollout/reward_histogram", "counts": COUNTS, "edges": []
    }  # fmt: skip


@pytest.mark.parametrize("tracker", ["stdout", "mlflow", "swanlab"])
def test_a_tracker_that_draws_none_goes_without(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_to(tracker, tmp_path, *(["track.mode=offline"] if tracker == "swanlab" else []))
    assert "failed" not in caplog.text


def test_a_resumed_run_has_each_histogram_once_and_its_own_rewards(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(workshop.folder / "trackio"))
    tracked = ("-s", "track.with=['jsonl', 'wandb', 'trackio']", "-s", "track.mode=offline", "-s", "track.naming=both")
    kill_after(workshop, 3, "run", *tracked, "-s", "run.num_rollout=4", "-s", "run.save_interval=2")
    workshop.slimectl("run", "--resume", "runs/a")
    folder = workshop.folder / "runs" / "a"
    lines = [json.loads(line) for line in (folder / "tracked.jsonl").read_text().splitlines()]
    histograms = [line for line in lines if "histogram" in line]
    assert [line["step"] for line in histograms] == [1, 2, 3, 4]
    for line in histograms:
        samples = (folder / f"step_{line['step']:06d}" / "samples.jsonl").read_text().splitlines()
        rewards = [json.loads(sample)["reward"] for sample in samples]
        assert line["counts"] == np.histogram(rewards, bins=10)[0].tolist()
    killed_too = {
        row["rollout/step"] for row in wandb_rows(folder, killed=1) if "rollout/reward_histogram/_type" in row
    }
    assert killed_too == {1, 2, 3, 4}
    with sqlite3.connect(next((workshop.folder / "trackio").glob("*.db"))) as database:
        rows = [(step, json.loads(text)) for step, text in database.execute("select step, metrics from metrics")]
    assert sorted(step for step, row in rows if "rollout/reward_histogram" in row) == [1, 2, 3, 4]
