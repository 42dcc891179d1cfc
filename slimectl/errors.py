"""All errors of slimectl, one class per remedy.

    SlimectlError                 exit 1   the command failed
    ├── SettingsError             exit 2   change a setting, a flag or an argument
    │   └── HookError             exit 2   fix your own function: its signature, or its return value
    ├── RecordError               exit 3   fix or drop a line of data
    ├── CheckpointError           exit 1   give another checkpoint, or convert this one
    ├── StorageError              exit 1   free space, or write elsewhere
    ├── DivergedError             exit 1   continue from the last checkpoint with other settings
    ├── OutOfMemoryError          exit 1   continue with settings that need less memory (`run` does this automatically)
    ├── StalledError              exit 124 fix what is stuck, and continue from the last checkpoint
    └── BackendError              exit 4   start, reach or install the backend
        ├── DiedError             exit 4   restart from the last checkpoint (`run` does this automatically)
        └── MissingExtraError     exit 4   run the `pip install` command in the message

A message is one line: what is wrong, where, and what to do next. Other exit codes: 130 interrupted, 143 ended by
SIGTERM, 129 by SIGHUP, 141 the reader of stdout closed the pipe.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from slimectl.system.redaction import redact_text

EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141


def first_line(error: BaseException, longest: int | None = None) -> str:
    """Return the first line of an error's message, or its type if it has none, up to `longest` characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:longest]


class Terminated(KeyboardInterrupt):
    """A signal other than SIGINT (Ctrl-C) ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class SlimectlError(Exception):
    """The command failed. The message is one line for the user."""

    exit_code = 1

    def __str__(self) -> str:
        """Return the message without secrets: it may quote an address, a setting or a server's response."""
        return redact_text(super().__str__())


class SettingsError(SlimectlError):
    """A setting, a flag or an argument is wrong."""

    exit_code = 2


class HookError(SettingsError):
    """A user's callable has a wrong signature, raised, or returned an invalid value."""


class RecordError(SlimectlError):
    """A line of data is invalid: `FILE:LINE: field: reason`."""

    exit_code = 3


class CheckpointError(SlimectlError):
    """A checkpoint is missing, damaged, or not of the expected kind."""


class StorageError(SlimectlError):
    """Writing failed (disk full, read-only, no permission). Nothing half-written keeps its final name."""


class DivergedError(SlimectlError):
    """Training met non-finite numbers and stopped before an update with them."""


class OutOfMemoryError(SlimectlError):
    """A model does not fit into memory. `settings` are values with which it may fit, by name, or empty."""

    def __init__(self, message: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.settings = dict(settings or {})


class StalledError(SlimectlError):
    """A run made no progress for run.stall_timeout seconds."""

    exit_code = 124  # as of timeout(1)


class BackendError(SlimectlError):
    """A backend (engine, server, cluster, library) is missing or does not answer."""

    exit_code = 4


class DiedError(BackendError):
    """A process or machine has died, and its memory is lost."""


class MissingExtraError(BackendError):
    """An optional dependency is not installed.

    >>> str(MissingExtraError("tensorboard", extra="tensorboard", wanted_by="track.with"))
    "track.with needs tensorboard, which is not installed. Run: pip install 'slimectl[tensorboard]'"
    """

    def __init__(self, package: str, *, extra: str, wanted_by: str) -> None:
        super().__init__(f"{wanted_by} needs {package}, which is not installed. Run: pip install 'slimectl[{extra}]'")
        self._arguments = (package, extra, wanted_by)

    def __reduce__(self) -> tuple[object, tuple[str, str, str]]:
        return _missing_extra, self._arguments  # worker processes return their errors pickled


LIBRARIES_OF_MODELS = ("torch", "transformers", "tokenizers", "safetensors")
"""Packages of the extra `torch`, needed only to read, sample or train models."""


def missing_library(error: ModuleNotFoundError, *, wanted_by: str) -> MissingExtraError | None:
    """Return the error for a library of models that is not installed, or None for another module."""
    package = (error.name or "").partition(".")[0]
    return MissingExtraError(package, extra="torch", wanted_by=wanted_by) if package in LIBRARIES_OF_MODELS else None


@contextmanager
def requiring(package: str, *, extra: str, wanted_by: str) -> Iterator[None]:
    """Raise MissingExtraError if an import in the block fails."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(package, extra=extra, wanted_by=wanted_by) from error


def _missing_extra(package: str, extra: str, wanted_by: str) -> MissingExtraError:
    return MissingExtraError(package, extra=extra, wanted_by=wanted_by)
