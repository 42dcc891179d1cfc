"""Trackers that cannot harm a run once it is under way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from slimectl.errors import BackendError, SettingsError, SlimectlError
from slimectl.ports import Tracker
from slimectl.types import TableRow


def say(text: str) -> None:
    """Words on stderr, if anybody still reads it."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


class Guarded:
    """A tracker whose first failure is told and whose further ones are not; the run goes on, and so do its tries."""

    def __init__(self, name: str, tracker: Tracker, *, warn: Callable[[str], None] = say) -> None:
        self.name = name
        self.tracker = tracker
        self._warn = warn
        self._told = False

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        with self._endured(f"at step {step}"):
            self.tracker.log(metrics, step=step)

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        with self._endured(f"at step {step}"):
            self.tracker.table(name, rows, step=step)

    def close(self) -> None:
        with self._endured("when it was closed"):
            self.tracker.close()

    @contextmanager
    def _endured(self, when: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a library comes up with: a chart is not worth a run
            if not self._told:
                self._told = True
                self._warn(
                    f"track.with: {self.name} failed {when}: {first_line(error)}; the run goes on, and its "
                    f"metrics.jsonl has every number"
                )


def first_line(error: BaseException) -> str:
    """What an error says, short enough for a message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def starting(name: str, *, way_out: str) -> Iterator[None]:
    """Raises BackendError, or SettingsError for arguments that the library does not take, where a tracker cannot start.

    `way_out` says what may help.
    """
    try:
        yield
    except SlimectlError:
        raise
    except TypeError as error:
        raise SettingsError(f"track.kwargs.{name}: {first_line(error)}") from error
    except Exception as error:
        raise BackendError(f"track.with: {name} cannot start: {first_line(error)}; {way_out}") from error
