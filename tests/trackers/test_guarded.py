"""A tracker's failure is told once and harms nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from slimectl.errors import BackendError, SettingsError
from slimectl.trackers.base import FaultTolerantTracker, Identity, TrackedRun, starting
from slimectl.trackers.jsonl import JsonlTracker


class Unsteady:
    """Fails at every odd step and when it is closed."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if step % 2:
            raise ConnectionError("server hung up\nmore of a traceback")
        self.seen.append(step)

    def close(self) -> None:
        raise ConnectionError("again")


def test_the_first_failure_is_told_and_what_works_later_is_tracked():
    told: list[str] = []
    unsteady = Unsteady()
    tracker = FaultTolerantTracker("wandb", unsteady, warn=told.append)
    for step in (1, 2, 3, 4):
        tracker.log({"train/lr": 1.0}, step=step)
    tracker.close()
    assert unsteady.seen == [2, 4]
    assert told == [
        "track.with: wandb failed at step 1: server hung up. The run continues, and its metrics.jsonl has every number."
    ]


def test_a_file_that_was_closed_under_it_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    inner = JsonlTracker(TrackedRun(tmp_path, lambda: Identity(run_id="a")))
    tracker = FaultTolerantTracker("jsonl", inner)
    inner.close()
    tracker.log({"train/lr": 1.0}, step=7)
    assert "jsonl failed at step 7" in caplog.text


def test_an_interrupt_goes_through():
    class Interrupted(Unsteady):
        def log(self, metrics: Mapping[str, float], *, step: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FaultTolerantTracker("wandb", Interrupted()).log({}, step=1)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            TypeError("init() got an unexpected keyword argument 'tag'"),
            SettingsError,
            r"track\.kwargs\.wandb: init\(\) got",
        ),
        (ConnectionError(), BackendError, r"wandb cannot start: ConnectionError\. Set WANDB_API_KEY"),
        (ZeroDivisionError("division by zero"), BackendError, "wandb cannot start: ZeroDivisionError: division by"),
        (BackendError("as it is"), BackendError, "^as it is$"),
    ],
)
def test_what_cannot_start_says_what_to_do(error: Exception, kind: type[Exception], words: str):
    with pytest.raises(kind, match=words), starting("wandb", way_out="Set WANDB_API_KEY"):
        raise error
