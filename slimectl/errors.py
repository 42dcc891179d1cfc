"""Everything that slimectl refuses, one class per remedy.

    SlimectlError                 exit 1   the work failed
    ├── SettingsError             exit 2   change a setting, a flag or an argument
    │   └── HookError             exit 2   mend your own function: its signature, or what it returned
    ├── RecordError               exit 3   mend or drop a line of data
    ├── CheckpointError           exit 1   give another checkpoint, or convert this one
    ├── StorageError              exit 1   free space, or write elsewhere
    ├── DivergedError             exit 1   go on from the last checkpoint with other settings
    └── BackendError              exit 4   start, reach or install what the work runs on
        ├── DiedError             exit 4   begin again from the last checkpoint (`run` does so by itself)
        └── MissingExtraError     exit 4   run the `pip install` that the message names

A message says what is wrong, where, and what to do next, in one line. Exit codes beside these: 130 interrupted,
141 the reader of our output went away.
"""

from __future__ import annotations

from slimectl.redaction import redact_text

EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141


class SlimectlError(Exception):
    """The work failed; the message is one line for a person."""

    exit_code = 1

    def __str__(self) -> str:
        """The message without secrets: it may quote an address, a setting, or what a server said."""
        return redact_text(super().__str__())


class SettingsError(SlimectlError):
    """A setting, a flag or an argument is wrong."""

    exit_code = 2


class HookError(SettingsError):
    """A user's callable has the wrong shape, raised, or returned what cannot be used."""


class RecordError(SlimectlError):
    """A line of data breaks its contract: `FILE:LINE: field: what`."""

    exit_code = 3


class CheckpointError(SlimectlError):
    """A checkpoint is missing, damaged, or not of the kind that was asked for."""


class StorageError(SlimectlError):
    """Writing failed (disk full, read-only, no permission); nothing half-written keeps its final name."""


class DivergedError(SlimectlError):
    """Training came upon numbers that are not finite, and stopped before it learnt from them."""


class BackendError(SlimectlError):
    """What the work runs on is missing or does not answer."""

    exit_code = 4


class DiedError(BackendError):
    """A process or machine that the work ran on is gone, and with it what it had in memory."""


class MissingExtraError(BackendError):
    """An optional dependency is not installed.

    >>> str(MissingExtraError("tensorboard", extra="tensorboard", wanted_by="track.with"))
    "track.with needs tensorboard, which is not installed; run: pip install 'slimectl[tensorboard]'"
    """

    def __init__(self, package: str, *, extra: str, wanted_by: str) -> None:
        super().__init__(f"{wanted_by} needs {package}, which is not installed; run: pip install 'slimectl[{extra}]'")
        self._made_of = (package, extra, wanted_by)

    def __reduce__(self) -> tuple[object, tuple[str, str, str]]:
        return _missing_extra, self._made_of  # worker processes hand their errors back pickled


def _missing_extra(package: str, extra: str, wanted_by: str) -> MissingExtraError:
    return MissingExtraError(package, extra=extra, wanted_by=wanted_by)
