"""The run as its trackers know it, and containment of their failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimectl.errors import BackendError, SettingsError, SlimectlError
from slimectl.protocols import Tracker
from slimectl.stdio import logger
from slimectl.types import TableRow


@dataclass(frozen=True)
class Identity:
    """Identity of a run at wandb and SwanLab; None leaves a field to the library and its environment variables.

    `run_id` stays the same when a run is resumed, so that its curves continue. `config` is shown beside them.
    """

    run_id: str
    name: str | None = None
    project: str = "slimectl"
    entity: str | None = None
    group: str | None = None
    mode: str | None = None
    host: str | None = None
    config: dict[str, Any] | None = None


@dataclass(frozen=True)
class TrackedRun:
    """A run as its trackers know it; every tracker's constructor takes it, then the arguments of track.kwargs.

    `log_dir` is track.dir, `one_axis` is track.always_use_train_step. `resumed_at` is the step after which a resumed
    run goes on, `rounds` the number of rounds if known, `rounds_done` those behind it. `identity()` is drawn once.
    """

    folder: Path
    identity: Callable[[], Identity]
    log_dir: Path | None = None
    one_axis: bool = False
    resumed_at: int | None = None
    rounds: int | None = None
    rounds_done: int = 0


class FaultTolerantTracker:
    """A tracker whose failures are contained: the first is reported, and every later metric is still tried."""

    def __init__(self, name: str, tracker: Tracker, *, warn: Callable[[str], None] = logger.warning) -> None:
        self.name = name
        self.tracker = tracker
        self._warn = warn
        self._warned = False

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        with self._contain_errors(f"at step {step}"):
            self.tracker.log(metrics, step=step)

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        with self._contain_errors(f"at step {step}"):
            self.tracker.table(name, rows, step=step)

    def close(self) -> None:
        with self._contain_errors("when it was closed"):
            self.tracker.close()

    @contextmanager
    def _contain_errors(self, moment: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any error of the library: a chart must not stop a run
            if not self._warned:
                self._warned = True
                self._warn(
                    f"track.with: {self.name} failed {moment}: {first_line(error)}; the run goes on, and its "
                    f"metrics.jsonl has every number"
                )


def first_line(error: BaseException) -> str:
    """First non-empty line of an error's message, or the name of its type."""
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
        raise BackendError(f"track.with: {name} cannot start: {first_line(error)}; {way_out}") from error
