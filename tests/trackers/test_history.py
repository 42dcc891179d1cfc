"""What a library holds of a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from slimectl.trackers.history import History, log_records, points_of

ROUND = {"train/lr": 0.5, "rollout/raw_reward": 0.25, "rollout/step": 1.0}


def test_a_line_is_missing_in_part_or_not_at_all():
    history = History(points_of([{"train/step": 4, **ROUND}, {"mine/x": 1.0}]))
    assert history.missing(ROUND, 4) == {}
    assert history.missing(ROUND | {"train/loss": 0.0}, 4) == {"train/loss": 0.0, "rollout/step": 1.0}
    assert history.missing(ROUND, 5) == ROUND
    assert history.missing({"mine/x": 1.0}, 4) == {"mine/x": 1.0}


def test_a_round_without_a_step_is_no_repetition():
    held, new = points_of([{"train/step": 4, **ROUND}]), {"rollout/raw_reward": 0.5, "rollout/step": 2.0}
    assert History(held).missing(new, 4) == new
    without_axes = History([("rollout/raw_reward", 4, None)], by_axis=False)
    assert without_axes.missing({"rollout/raw_reward": 0.5, "rollout/step": 2.0}, 4) == {}


def test_files_that_cannot_be_read_are_a_warning(caplog: pytest.LogCaptureFixture):
    def points() -> NoReturn:
        raise ImportError("no module named wandb.proto")

    assert History.read("wandb", points) is None
    assert "track.with: cannot read the run's records at wandb (no module named wandb.proto)" in caplog.text


def test_a_log_has_the_records_before_the_one_that_was_cut_off(tmp_path: Path):
    def chunk(kind: int, data: bytes) -> bytes:
        return bytes(4) + len(data).to_bytes(2, "little") + bytes([kind]) + data

    block = bytes(7) + chunk(1, b"one") + chunk(2, b"a" * (32768 - 7 - 10 - 7 - 3))  # three bytes of padding follow
    log = tmp_path / "log"
    log.write_bytes(block + bytes(3) + chunk(4, b"b") + chunk(1, b"cut off")[:-2])
    first, second = log_records(log)
    assert first == b"one"
    assert (second[:1], second[-1:], len(second)) == (b"a", b"b", 32768 - 7 - 10 - 7 - 3 + 1)
