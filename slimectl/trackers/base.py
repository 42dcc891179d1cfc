"""The run as its trackers see it, and isolation of their failures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slimectl.errors import BackendError, SettingsError, SlimectlError
from slimectl.protocols import NO_PROGRESS, Progress, Tracker
from slimectl.system.stdio import logger
from slimectl.types import TableRow


@dataclass(frozen=True)
class Identity:
    """Identity of a run at wandb and SwanLab. None leaves a field to the library and its environment variables.

    `run_id` stays the same when a run is resumed, so that its curves continue. `config` is shown with them.
    """

    run_id: str
    name: str | None = None
    project: str = "slimectl"
    entity: str | None = None
    group: str | None = None
    mode: str | None = None
    host: str | None = None
    api_key: str | None = field(default=None, repr=False)
    config: dict[str, Any] | None = None


@dataclass(frozen=True)
class TrackedRun:
    """A run as its trackers see it. Every tracker's constructor receives it, then the arguments of track.kwargs.

    `log_dir` is track.dir, `one_axis` is track.always_use_train_step. `resumed` is whether the run has recorded
    something before, and `resumed_at` is the step of the checkpoint from which it resumes. `rounds` is the number of
    rounds if known, `rounds_done` the number of finished ones. `identity()` is drawn once. `progress` shows the run on
    a terminal.
    """

    folder: Path
    identity: Callable[[], Identity]
    log_dir: Path | None = None
    one_axis: bool = False
    resumed: bool = False
    resumed_at: int | None = None
    rounds: int | None = None
    rounds_done: int = 0
    progress: Progress = NO_PROGRESS


MODE_VARIABLES = {"wandb": "WANDB_MODE", "swanlab": "SWANLAB_MODE"}
OFFLINE = ("offline", "dryrun", "disabled", "local")
"""Modes in which a tracker sends nothing. dryrun is an older name at wandb, local a mode of SwanLab."""


def is_offline(tracker: str, mode: str | None) -> bool:
    """Return whether a tracker sends nothing in this mode. Without a mode, its environment variable decides."""
    variable = MODE_VARIABLES.get(tracker)
    return variable is not None and (mode or os.environ.get(variable)) in OFFLINE


def flush(tracker: Tracker) -> None:
    """Make a tracker write data that its library holds back, if it has a method `flush`."""
    if callable(method := getattr(tracker, "flush", None)):
        method()


def log_histogram(tracker: Tracker, name: str, values: Sequence[float], *, step: int) -> None:
    """Log a histogram of values to a tracker that can draw one with its method `histogram`."""
    if callable(method := getattr(tracker, "histogram", None)):
        method(name, values, step=step)


class WrappedTracker:
    """Passes calls and attributes on to a tracker, unless a subclass overrides them."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tracker, name)


class FaultTolerantTracker(WrappedTracker):
    """A tracker whose failures are contained. The first is reported, and later metrics are still attempted."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        *,
        setting: str = "track.with",
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        super().__init__(tracker)
        self.name = name
        self.setting = setting
        self._warn = warn
        self._warned = False

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        with self._contain_errors(f"at step {step}"):
            self.tracker.log(metrics, step=step)

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        with self._contain_errors(f"at step {step}"):
            self.tracker.table(name, rows, step=step)

    def histogram(self, name: str, values: Sequence[float], *, step: int) -> None:
        with self._contain_errors(f"at step {step}"):
            log_histogram(self.tracker, name, values, step=step)

    def flush(self) -> None:
        with self._contain_errors("when a checkpoint was saved"):
            flush(self.tracker)

    def close(self) -> None:
        with self._contain_errors("when it was closed"):
            self.tracker.close()

    @contextmanager
    def _contain_errors(self, moment: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any error of the library, because a chart must not stop a run
            if not self._warned:
                self._warned = True
                self._warn(
                    f"{self.setting}: {self.name} failed {moment}: {first_line(error)}. The run continues, and its "
                    f"metrics.jsonl has every number."
                )


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message, or its type, or a rejected field and the reason."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def starting(name: str, *, way_out: str) -> Iterator[None]:
    """Turn errors of a tracker's start into BackendError, or into SettingsError for arguments that it rejects.

    `way_out` is the remedy that the message suggests.
    """
    try:
        yield
    except SlimectlError:
        raise
    except TypeError as error:
        raise SettingsError(f"track.kwargs.{name}: {first_line(error)}") from error
    except Exception as error:
        kind, text = type(error).__name__, first_line(error)
        if text != kind and not isinstance(error, ValidationError):  # it already contains the rejected field
            text = f"{kind}: {text}"
        raise BackendError(f"track.with: {name} cannot start: {text}. {way_out}.") from error
