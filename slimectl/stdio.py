"""Standard streams of this process: records on a descriptor of their own, words on stderr, closed ones kept shut."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import sys
from typing import IO, Any, TextIO

from slimectl.errors import StorageError

PRIVATE = 64
"""Lowest number of our private descriptors: those that a program closes or reuses by habit are below."""
STDOUT = "<stdout>"

_protected = False
_records: io.BufferedWriter | None = None
_input: IO[bytes] | None = None


class _Output(io.FileIO):
    """Stdout as bytes: the first failure is raised in one line, and nothing is tried after it.

    Python flushes what is left in a buffer when it exits: a stream that has failed must not fail again then.
    """

    _failed = False

    def write(self, data: Any) -> int | None:
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


class _Words(io.FileIO):
    """Stderr as bytes: words that nobody takes are lost, and the work goes on."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return len(memoryview(data))


def output_error(error: OSError) -> StorageError:
    """Return the error for a stdout that takes nothing more."""
    if error.errno == errno.EBADF:
        return StorageError(f"{STDOUT}: is closed; give --out FILE, or open it")
    return StorageError(f"{STDOUT}: cannot be written: {error.strerror or error}; free space or write elsewhere")


def protect() -> None:
    """Take over the standard streams of this process; called once, before any other file is opened.

    A closed descriptor 0, 1 or 2 would be given to the next file that is opened, and words or records would go there.
    Each is opened on /dev/null the wrong way round, so that whoever uses it gets the error of a closed one; closed
    stderr swallows words.
    """
    global _protected
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        if _is_closed(number):
            _point(number, os.open(os.devnull, flags))
    _protected = True
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _text(_Output(1, "w", closefd=False), line_buffering=os.isatty(1))
    sys.stderr = words_to(2)
    # For whoever writes to the first ones, which are None where a descriptor was closed.
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc, assignment]


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def _point(number: int, opened: int) -> None:
    """Make a standard descriptor what has been opened, which often has its number already."""
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    os.set_inheritable(number, True)


def words_to(number: int) -> TextIO:
    """Return a text stream for words on a descriptor: a line at a time, never an error."""
    return _text(_Words(number, "w", closefd=False), line_buffering=True)


def _text(raw: io.FileIO, *, line_buffering: bool) -> TextIO:
    buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=line_buffering)


def reserve_stdout() -> None:
    """Keep stdout for records: from now on descriptor 1 is stderr for everybody else.

    What a user's function, a library in C, a thread, a child process or a worker prints cannot land among records
    then. Does nothing in a process that is not ours (`protect`): there stdout is the caller's.
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
    """Return a duplicate of a descriptor that no child process inherits, out of the way of low numbers."""
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, PRIVATE)
    except OSError:  # a limit below that
        return os.dup(number)


def output() -> Any:
    """Return the binary stream of records: the private stdout, or that of the caller."""
    return sys.stdout.buffer if _records is None else _records


def emit(text: str) -> None:
    """Write a line to stdout. Raises StorageError where it takes no more, BrokenPipeError where its reader has gone."""
    if _records is None:
        print(text, flush=True)
        return
    _records.write(f"{text}\n".encode(errors="backslashreplace"))
    _records.flush()


def flush() -> None:
    """Write out what is left. Raises as `emit`."""
    stream = sys.stdout if _records is None else _records
    stream.flush()


def is_terminal() -> bool:
    """Return whether records would go to a terminal."""
    return (sys.stdout if _records is None else _records).isatty()


def input_bytes() -> Any:
    """Return the binary stream of stdin; descriptor 0 is empty for everybody else from then on."""
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
    """Put back a sys.stdout or sys.stderr, and their descriptors, that somebody closed or deleted."""
    for name, number in (("stderr", 2), ("stdout", 1)):
        if _protected and _is_closed(number):
            _point(number, os.dup(2) if number == 1 else os.open(os.devnull, os.O_WRONLY))
        stream = getattr(sys, name, None)
        if stream is None or getattr(stream, "closed", False):
            setattr(sys, name, words_to(number))


def say(text: str) -> None:
    """Write a line of words to stderr, come what may."""
    mend()
    print(text, file=sys.stderr, flush=True)
