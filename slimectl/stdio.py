"""Standard streams of this process: records on a private descriptor, messages on stderr, closed ones replaced.

The library sends its messages to one logger, `slimectl`; commands write them to stderr, other programs as they like:

    logging.getLogger("slimectl").setLevel(logging.ERROR)         # only what went wrong
    logging.getLogger("slimectl").addHandler(MyHandler())         # or to another place
"""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import sys
from contextlib import suppress
from typing import IO, Any, TextIO

from slimectl.errors import StorageError
from slimectl.redaction import redact_text

PRIVATE = 64
"""Lowest number of private descriptors: programs habitually close or reuse those below."""
STDOUT = "<stdout>"

# One logger, not one for each module: a filter of a logger does not see the records of its children, and secrets are to
# be masked before any handler, also of an embedding program, gets a message. A record names its module.
logger = logging.getLogger("slimectl")

_protected = False
_records: io.BufferedWriter | None = None
_input: IO[bytes] | None = None


class _Output(io.FileIO):
    """Stdout as bytes: the first failure is raised as an error of one line, later writes are discarded.

    Python flushes remaining buffers when it exits: a stream that has failed must not fail again then.
    """

    _failed = False

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        if self._failed:
            return len(memoryview(data))
        try:
            return super().write(data)
        except BrokenPipeError:
            self._failed = True
            raise
        except OSError as error:
            self._failed = True
            raise output_error(error) from error


class _MessageOutput(io.FileIO):
    """Stderr as bytes: messages that cannot be written are lost, without an error."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return len(memoryview(data))


def output_error(error: OSError) -> StorageError:
    """Return the error for a stdout that cannot be written."""
    if error.errno == errno.EBADF:
        return StorageError(f"{STDOUT}: is closed; give --out FILE, or open it")
    return StorageError(f"{STDOUT}: cannot be written: {error.strerror or error}; free space or write elsewhere")


def protect() -> None:
    """Take over the standard streams of this process; called once, before any other file is opened.

    A closed descriptor 0, 1 or 2 would be reused by the next file that is opened, and messages or records would be
    written there. Each is opened on /dev/null in the opposite mode, so that its use raises the error of a closed one;
    a closed stderr discards messages.
    """
    global _protected
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        if _is_closed(number):
            _redirect(number, os.open(os.devnull, flags))
    _protected = True
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _text(_Output(1, "w", closefd=False), line_buffering=os.isatty(1))
    sys.stderr = words_to(2)
    # For code that writes to the original streams, which are None if a descriptor was closed.
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc, assignment]


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def _redirect(number: int, descriptor: int) -> None:
    """Move an opened descriptor to a standard number, unless it has that number already."""
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.set_inheritable(number, True)


def words_to(number: int) -> TextIO:
    """Return a line-buffered text stream for messages on a descriptor, which never raises."""
    return _text(_MessageOutput(number, "w", closefd=False), line_buffering=True)


def _text(raw: io.FileIO, *, line_buffering: bool) -> TextIO:
    buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=line_buffering)


def reserve_stdout() -> None:
    """Reserve stdout for records: from now on descriptor 1 is stderr for all other code.

    Output of a user's function, a C library, a thread, a child process or a worker cannot mix with records then. Does
    nothing in a process that has not called `protect`: there stdout belongs to the caller.
    """
    global _records
    if not _protected or _records is not None:
        return
    sys.stdout.flush()
    number = _private(1)
    os.dup2(2, 1)
    _records = io.BufferedWriter(_Output(number, "w", closefd=False))
    sys.stdout = sys.__stdout__ = words_to(1)  # type: ignore[misc, assignment]


def _private(number: int) -> int:
    """Return a duplicate of a descriptor, at a high number, that child processes do not inherit."""
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, PRIVATE)
    except OSError:  # the limit of open files is below PRIVATE
        return os.dup(number)


def output() -> Any:
    """Return the binary stream for records: the private stdout, or the caller's."""
    return sys.stdout.buffer if _records is None else _records


def emit(text: str) -> None:
    """Write a line to stdout. Raises StorageError if writing fails, BrokenPipeError if its reader has closed it."""
    if _records is None:
        print(text, flush=True)
        return
    _records.write(f"{text}\n".encode(errors="backslashreplace"))
    _records.flush()


def flush() -> None:
    """Flush stdout. Raises the errors of `emit`."""
    stream = sys.stdout if _records is None else _records
    stream.flush()


def is_terminal() -> bool:
    """Return whether records would go to a terminal."""
    return (sys.stdout if _records is None else _records).isatty()


def input_bytes() -> Any:
    """Return the binary stream of stdin; from then on descriptor 0 is empty for all other code."""
    global _input
    if not _protected:
        return sys.stdin.buffer
    if _input is None:
        _input = open(_private(0), "rb")  # noqa: SIM115  for the life of the process
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
    return _input


def mend() -> None:
    """Restore sys.stdout and sys.stderr, and their descriptors, if other code closed or deleted them."""
    for name, number in (("stderr", 2), ("stdout", 1)):
        if _protected and _is_closed(number):
            _redirect(number, os.dup(2) if number == 1 else os.open(os.devnull, os.O_WRONLY))
        stream = getattr(sys, name, None)
        if stream is None or getattr(stream, "closed", False):
            setattr(sys, name, words_to(number))


def say(text: str) -> None:
    """Write a line of a command, or of another process, to stderr, restoring it first; the library uses `logger`."""
    mend()
    print(text, file=sys.stderr, flush=True)


class RedactSecrets(logging.Filter):
    """Masks secrets in the text of every record; keeps all records."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact_text(record.getMessage()), None
        return True


logger.addFilter(RedactSecrets())


class StderrHandler(logging.Handler):
    """Writes messages to the present sys.stderr, a line each; those that cannot be written are lost."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):
            say(self.format(record))


def log_to_stderr() -> None:
    """Write all messages to stderr, and to no other handler: for a process that belongs to slimectl alone."""
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        logger.addHandler(StderrHandler())
