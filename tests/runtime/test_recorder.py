"""What a run reads back of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from slimectl.algorithms.normalization import RewardMoments
from slimectl.data.atomic_replace import write_text
from slimectl.data.run_dir import RunDir
from slimectl.errors import CheckpointError
from slimectl.runtime.recorder import RunRecorder, load_state
from slimectl.settings import Settings
from slimectl.stages.signal import SignalCount
from slimectl.stages.train import TrainState
from slimectl.types import StepReport, TableRow, TrainingSample


def test_a_checkpoint_of_an_older_run_is_refused_in_one_line_before_weights_are_read(tmp_path: Path):
    folder = RunDir(tmp_path / "old")
    folder.start("", force=False)
    facts = {"step": 3, "rollout_id": 3, "pending": [], "sizes": {}, "scores": [], "evaluations": []}

    def fill(staged: Path) -> None:
        (staged / "policy").mkdir()
        write_text(staged / "state.json", json.dumps(facts))

    folder.save(3, fill)
    with pytest.raises(CheckpointError, match=r"step_000003/state.json: no 'sampling'.*--model \S+step_000003$"):
        RunRecorder(folder, Settings()).rewind(print)


def test_rows_that_wait_in_an_older_checkpoint_keep_their_loss_weights(tmp_path: Path):
    row = {"tokens": [1, 2, 3], "response_length": 2, "weights": [1.0, 0.0], "advantages": [0.5, 0.5], "group": 4}
    write_text(tmp_path / "state.json", json.dumps({"step": 3, "rollout_id": 2, "pending": [[7, row]]}))
    policy: Any = None  # read only where there is no state
    state = load_state(tmp_path, policy)
    assert state.pending == [(7, TrainingSample([1, 2, 3], 2, [1.0, 0.0], [0.5, 0.5], group=4))]


class Weightless:
    """A policy whose checkpoint is an empty file."""

    weight_version = "3"

    def save(self, folder: Path) -> None:
        (folder / "model").touch()


def test_a_checkpoint_has_all_of_the_training_state(tmp_path: Path):
    row = TrainingSample([1, 2], 1, [1.0], [0.5], group=4)
    state = TrainState(3, 2, [(7, row)], SignalCount(2, 1, 1, "every reward was 0"), RewardMoments(8, 0.5, 2.0))
    assert all(getattr(state, field.name) != getattr(TrainState(), field.name) for field in fields(TrainState))
    folder = RunDir(tmp_path / "run")
    folder.start("", force=False)
    RunRecorder(folder, Settings()).save(Weightless(), state, [])  # type: ignore[arg-type]
    assert RunRecorder(folder, Settings()).rewind(print) == state


class Service:
    """Keeps every line, as a service does."""

    keeps_lines = True

    def __init__(self) -> None:
        self.lines: list[tuple[int, float]] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.lines += [(step, metrics["train/loss"])] if "train/loss" in metrics else []

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None: ...

    def close(self) -> None: ...


def test_a_service_gets_no_line_again_that_it_had_before_the_run_was_killed(tmp_path: Path):
    service = Service()

    def recorder(step: int, *, resumed: bool) -> RunRecorder:
        journal = RunRecorder(RunDir(tmp_path), Settings())
        if resumed:
            journal.rewind(print)
        journal.trackers = [service]
        for number in range(1, step + 1):
            journal.record(StepReport(number, number, str(number), {"train/loss": 0.5 / number}))
        return journal

    recorder(2, resumed=False)
    recorder(3, resumed=True)  # from the start: there is no checkpoint
    assert service.lines == [(1, 0.5), (2, 0.25), (3, 0.5 / 3)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
