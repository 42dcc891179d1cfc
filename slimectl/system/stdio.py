"""Standard streams of this process: records on a private descriptor, messages on stderr, closed ones replaced.

The library sends its messages to one logger, `slimectl`. Commands write them to stderr, other programs as they like:

    logging.getLogger("slimectl").setLevel(logging.ERROR)         # only what went wrong
    logging.getLogger("slimectl").addHandler(MyHandler())         # or to another place
"""

from __future__ import annotations

import codecs
import errno
import io
import locale
import logging
import os
import stat
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO

from slimectl.errors import StorageError
from slimectl.system.redaction import redact_text

STDOUT = "<stdout>"

# One logger, not one for each module: a filter of a logger does not see the records of its children, and secrets are to
# be masked before any handler, also of an embedding program, gets a message. A record names its module.
logger = logging.getLogger("slimectl")

_protected = False
_encoding = "utf-8"
"""Encoding of texts for people, as protect finds it. Records are UTF-8 anywhere."""
_records: io.BufferedWriter | None = None
_input: IO[bytes] | None = None


class _Output(io.FileIO):
    """Stdout or stderr as bytes. What follows the first failure of stdout is discarded, as is any failure of stderr.

    Python flushes remaining buffers when it exits: a stream that has failed must not fail again then.
    """

    def __init__(self, number: int, *, messages: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self._messages, self._failed = messages, False

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        size = len(memoryview(data))
        try:
            if self._failed:
                return size
            if not (_frame and self.isatty()):
                return super().write(data)
            super().write(ERASE + bytes(data) + _frame)  # at once: neither a thread nor a child comes between
        except OSError as error:
            self._failed = not self._messages
            if self._failed and isinstance(error, BrokenPipeError):
                raise
            if self._failed:
                raise output_error(error) from error
        return size


ERASE = b"\x1b[J"
"""Clears the terminal from the cursor on."""
_frame = b""
"""Text drawn below the lines of this process, after which the cursor returns to its place. Empty if there is none."""


def draw_below(text: str) -> None:
    """Show one line of the terminal of stderr below all other lines, in place of the one before. "" shows none.

    The cursor stays a row above it, so that text of other processes overwrites nothing.
    """
    global _frame
    before = _frame
    # Index down and up makes room at the bottom of the screen without losing the column.
    line = b"\x1bD\x1b[A\x1b7\x1b[B\r" + text.encode(_encoding, errors=PLAIN) + b"\x1b8"
    _frame = line if text else b""
    if before or _frame:
        with suppress(OSError):
            os.write(2, ERASE + _frame)


def writes_to_pipe() -> bool:
    """Return whether records go to a pipe, which is another command's stdin."""
    with suppress(OSError, ValueError):
        return stat.S_ISFIFO(os.fstat(_stream().fileno()).st_mode)
    return False


def output_error(error: OSError) -> StorageError:
    """Return the error for a stdout that cannot be written."""
    if error.errno == errno.EBADF:
        return StorageError(f"{STDOUT}: is closed. Use --out FILE, or open it.")
    return StorageError(f"{STDOUT}: cannot be written: {error.strerror or error}. Free space or write elsewhere.")


def protect() -> None:
    """Take over the standard streams of this process. Called once, before any other file is opened.

    A closed descriptor 0, 1 or 2 would be reused by the next file that is opened, and messages or records would be
    written there. Each is opened on /dev/null in the opposite mode, so that its use raises the error of a closed one.
    A closed stderr discards messages.
    """
    global _protected, _encoding
    _encoding = _text_encoding(sys.stdout or sys.stderr)
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        if _is_closed(number):
            _redirect(number, os.open(os.devnull, flags))
    _protected = True
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _text(_Output(1, messages=False), line_buffering=os.isatty(1))
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
    return _text(_Output(number, messages=True), line_buffering=True)


def _text(raw: io.FileIO, *, line_buffering: bool) -> TextIO:
    buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, encoding=_encoding, errors=PLAIN, line_buffering=line_buffering)


PLAIN = "slimectl-plain"
"""Error handler that writes drawings and typographic signs in ASCII, and other characters as escapes."""
LOOKALIKES = {
    "…": "...", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "×": "x", "≤": "<=", "≥": ">=", "→": "->",
    "─": "-", "━": "-", "│": "|", "┃": "|", "\u2800": " ",
}  # fmt: skip


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement of characters that an encoding lacks, and the position after them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_ascii, error.object[error.start : error.end])), error.end


def _ascii(char: str) -> str:
    """Return ASCII for a sign, a corner (box drawing), a block or dots (braille), or else an escape."""
    if "\u2500" <= char <= "\u257f":
        return LOOKALIKES.get(char, "+")
    if "\u2580" <= char <= "\u259f" or "\u2800" < char <= "\u28ff":
        return "*"
    return LOOKALIKES.get(char) or char.encode("ascii", "backslashreplace").decode()


codecs.register_error(PLAIN, _plain)


def _text_encoding(stream: TextIO | None) -> str:
    """Return utf-8 if the stream, or without one the locale, can take it, else ascii."""
    name = getattr(stream, "encoding", None) or locale.getpreferredencoding(False)
    try:
        return "utf-8" if codecs.lookup(name).name.startswith("utf") else "ascii"
    except LookupError:
        return "ascii"


def reserve_stdout() -> None:
    """Reserve stdout for records: from now on descriptor 1 is stderr for all other code.

    Output of a user's function, a C library, a thread, a child process or a worker cannot mix with records then. Does
    nothing in a process that has not called `protect`: there stdout belongs to the caller.
    """
    global _records
    if not _protected or _records is not None:
        return
    sys.stdout.flush()
    _records = io.BufferedWriter(_Output(os.dup(1), messages=False))
    os.dup2(2, 1)
    sys.stdout = sys.__stdout__ = words_to(1)  # type: ignore[misc, assignment]


def _stream() -> TextIO | io.BufferedWriter:
    return sys.stdout if _records is None else _records


def output() -> Any:
    """Return the binary stream for records: the private stdout, or the caller's."""
    return sys.stdout.buffer if _records is None else _records


def emit(text: str) -> None:
    """Write a line to stdout. Raises StorageError if writing fails, BrokenPipeError if its reader has closed it."""
    if _records is None:
        print(text, flush=True)
        return
    _records.write(f"{text}\n".encode(_encoding, errors=PLAIN))
    _records.flush()


def flush() -> None:
    """Flush stdout. Raises the errors of `emit`."""
    _stream().flush()


def is_terminal() -> bool:
    """Return whether records would go to a terminal."""
    return _stream().isatty()


def input_bytes() -> Any:
    """Return the binary stream of stdin. From then on descriptor 0 is empty for all other code."""
    global _input
    if not _protected:
        return sys.stdin.buffer
    if _input is None:
        _input = open(os.dup(0), "rb")  # noqa: SIM115  for the life of the process
        _redirect(0, os.open(os.devnull, os.O_RDONLY))
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
    """Write a line of a command, or of another process, to stderr, restoring it first. The library uses `logger`."""
    mend()
    print(text, file=sys.stderr, flush=True)


def note(text: str, *, level: str = "info") -> None:
    """Write a command's informational line to stderr, unless the message level hides it (--quiet)."""
    if shows_notes(level):
        say(text)


def shows_notes(level: str = "info") -> bool:
    """Return whether messages of this level are shown."""
    current = os.environ.get(LOG_LEVEL, "info").lower()
    return LEVELS.index(level) >= LEVELS.index(current if current in LEVELS else "info")


def quantity(number: int, noun: str) -> str:
    """Return a count with its noun, in the singular for one.

    >>> quantity(1, "step"), quantity(2, "step")
    ('1 step', '2 steps')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class RedactSecrets(logging.Filter):
    """Masks secrets in the text of every record. Keeps all records."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact_text(record.getMessage()), None
        return True


logger.addFilter(RedactSecrets())


LOG_LEVEL = "SLIMECTL_LOG_LEVEL"
"""Variable with the level of messages, which the processes that are started inherit."""
LEVELS = ("debug", "info", "warning", "error")
POSITIONS = logging.Formatter("[%(asctime)s] %(filename)s:%(lineno)d - %(message)s", "%Y-%m-%d %H:%M:%S")


FILES_ONLY = {"files_only": True}
"""Argument `extra` of a message that a terminal shows in another form: it goes only to files."""


class StderrHandler(logging.Handler):
    """Writes each message as a line to the current sys.stderr. Messages that cannot be written are lost."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "files_only", False):
            return
        with suppress(OSError, ValueError):
            say(self.format(record))


def log_to_stderr(*, positions: bool = False) -> None:
    """Write messages from the level of SLIMECTL_LOG_LEVEL on to stderr, and to no other handler.

    Only for slimectl's own processes. With `positions`, and at level debug, a line begins with its time and
    the place in the code. Files get messages from info on at any level. May be called again when the level has changed.
    """
    level = os.environ.get(LOG_LEVEL, "info").lower()
    number = logging.getLevelNamesMapping()[level.upper() if level in LEVELS else "INFO"]
    logger.setLevel(min(number, logging.INFO))
    logger.propagate = False
    handlers = [handler for handler in logger.handlers if isinstance(handler, StderrHandler)]
    handler = handlers[0] if handlers else StderrHandler()
    handler.setLevel(number)
    handler.setFormatter(POSITIONS if positions or level == "debug" else None)
    if not handlers:
        logger.addHandler(handler)


class WithLevel(logging.Formatter):
    """The format of POSITIONS, with the level of warnings and errors before the place."""

    def format(self, record: logging.LogRecord) -> str:
        line = POSITIONS.format(record)
        return line if record.levelno < logging.WARNING else line.replace("] ", f"] {record.levelname} ", 1)


class LogFile(logging.FileHandler):
    """Appends messages to a file, which the first one creates. Messages that cannot be written are lost."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None: ...


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Append the messages of the block to a file too, each with its time and place, and the error that ends it."""
    handler = LogFile(path, encoding="utf-8", delay=True)
    handler.setFormatter(WithLevel())
    logger.addHandler(handler)
    try:
        yield
    except Exception as error:
        position = traceback.extract_tb(error.__traceback__)[-1]
        text = redact_text(f"{type(error).__name__}: {error}")
        handler.handle(logger.makeRecord(
            logger.name, logging.ERROR, position.filename, position.lineno or 0, text, (), None
        ))  # fmt: skip
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()
