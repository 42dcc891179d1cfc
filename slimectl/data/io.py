"""Byte input and output by path: plain, .gz, .zst, stdin and stdout. Output files appear only once complete."""

from __future__ import annotations

import errno
import gzip
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from slimectl.data.atomic_replace import new_file
from slimectl.errors import RecordError, SettingsError, StorageError, requiring
from slimectl.system import stdio
from slimectl.system.model_files import follow_links

CHUNK_BYTES = 1 << 16
UTF8_BOM = b"\xef\xbb\xbf"


GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
OTHER_FORMATS = {
    b"PAR1": "a Parquet file. Prompts can be read from FILE.parquet, but samples only from JSON Lines",
    b"ARROW1": "an Arrow file. Prompts can be read from FILE.arrow, but samples only from JSON Lines",
    b"BZh": "compressed by bzip2. Decompress it: bzip2 -dc",
    b"\xfd7zXZ": "compressed by xz. Decompress it: xz -dc",
    b"PK\x03\x04": "a zip archive. Unpack it: unzip -p",
}
"""Name and remedy of unsupported input formats, by first bytes."""


def byte_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line with its line ending) of a file or stdin.

    Gzip and zstd are recognized by their first bytes. Raises RecordError for other formats and damaged data,
    SettingsError for a missing file.
    """
    number = 0
    name = "<stdin>" if str(path) == "-" else str(path)
    try:
        with _open_input(path) as file:
            for number, line in enumerate(_lines(file, name), start=1):
                yield number, line.removeprefix(UTF8_BOM) if number == 1 else line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RecordError(f"{name}:{number + 1}: damaged or truncated ({error}). Write or download it again.") from None
    except FileNotFoundError:
        raise missing_file(name) from None
    except OSError as error:
        reason = "is closed" if error.errno == errno.EBADF else f"cannot be read: {error.strerror or error}"
        raise RecordError(f"{name}: {reason}. Give a file or an open pipe.") from error


def missing_file(name: str) -> SettingsError:
    """Return the error for a file that does not exist."""
    hint = ". A part of a file is FILE@[a:b], with whole numbers a and b" if "@[" in name else ""
    return SettingsError(f"{name}: no such file{hint}")


def _open_input(path: str | Path) -> Any:
    if str(path) == "-":
        return nullcontext(stdio.input_bytes())
    return open(readable(path), "rb", buffering=CHUNK_BYTES)


def _lines(file: Any, name: str) -> Iterator[bytes]:
    """Return the lines of a file. Decompress it if its suffix or its first bytes indicate compression."""
    start = first_bytes(file)
    if start.startswith(GZIP) or name.lower().endswith(".gz"):
        return iter(gzip.GzipFile(fileobj=file))
    if start.startswith(ZSTD) or name.lower().endswith(".zst"):
        return _zstd_lines(file)
    if kind := next((kind for magic, kind in OTHER_FORMATS.items() if start.startswith(magic)), ""):
        raise RecordError(f"{name}: this is {kind}")
    return iter(file)


def first_bytes(file: Any) -> bytes:
    """Return the next bytes of a buffered file without consuming them, or b"" if it cannot look ahead."""
    return bytes(file.peek(8)[:8]) if hasattr(file, "peek") else b""


def is_compressed(path: Path) -> bool:
    """Return whether a regular file is compressed, by its suffix or its first bytes."""
    if path.suffix.lower() in (".gz", ".zst"):
        return True
    with path.open("rb") as file:
        return file.read(4).startswith((GZIP, ZSTD))


SLICE = re.compile(r"(?P<path>.+)@\[(?P<a>-?\d*):(?P<b>-?\d*)\]")


def split_slice(source: str) -> tuple[str, slice | None]:
    """Return the path and the slice of `path@[a:b]`. The slice is None for other sources and for a file of that name.

    >>> split_slice("scored.jsonl@[8:]"), split_slice("scored.jsonl")
    (('scored.jsonl', slice(8, None, None)), ('scored.jsonl', None))
    """
    match = SLICE.fullmatch(source)
    if match is None or Path(source).exists():
        return source, None
    a, b = (int(text) if text not in ("", "-") else None for text in match.group("a", "b"))
    return match["path"], slice(a, b)


_spooled: dict[str, Any] = {}
"""Temporary files with the content of pipes, by path."""


def spool(path: str | Path) -> None:
    """Copy the content of a pipe to a temporary file, so that `byte_lines` can read it repeatedly."""
    if str(path) in _spooled or not is_pipe(path):
        return
    copy = tempfile.NamedTemporaryFile(prefix="slimectl-")  # noqa: SIM115  for the life of the process
    try:
        with open(path, "rb") as pipe:
            shutil.copyfileobj(pipe, copy)
        copy.flush()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from error
    _spooled[str(path)] = copy


def readable(path: str | Path) -> str | Path:
    """Return the file to read for a path: itself, or the spooled copy of a pipe."""
    copy = _spooled.get(str(path))
    return follow_links(Path(path)) if copy is None else str(copy.name)


def zstandard(wanted_by: str) -> Any:
    """Return the zstandard module. Raises MissingExtraError with `wanted_by` as the reason."""
    with requiring("zstandard", extra="zstd", wanted_by=wanted_by):
        import zstandard as library
    return library


def _zstd_lines(file: IO[bytes]) -> Iterator[bytes]:
    # Decompressed manually, because zstandard's own reader accepts a truncated file as complete.
    library = zstandard(f"reading {getattr(file, 'name', 'a .zst file')}")
    frame = None
    remainder = b""
    while chunk := file.read(CHUNK_BYTES):
        while chunk:
            frame = frame or library.ZstdDecompressor().decompressobj()
            try:
                *lines, remainder = (remainder + frame.decompress(chunk)).split(b"\n")
            except library.ZstdError as error:
                raise EOFError(error) from None
            for line in lines:
                yield line + b"\n"
            chunk = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("compressed data ended before its end marker")
    if remainder:
        yield remainder


class AtomicWriter:
    """Byte output: directly to stdout, a device or a pipe, or to a staged file that `commit` renames into place."""

    def __init__(self, path: str) -> None:
        self.path = path
        # Links are resolved: renaming over the link would leave its target unchanged.
        self._final = None if is_pipe(path) else Path(os.path.realpath(path))
        self._staged: Path | None = None
        self._file: Any = None
        self._raw: IO[bytes] | None = None
        self._flush_each = False

    def open(self) -> None:
        try:
            if self.path == "-":
                self._raw = stdio.output()
            else:
                # An unused name, so that files of other writers or of the user stay untouched.
                self._staged = self._final and new_file(self._final)
                self._raw = open(self._staged or self.path, "wb")  # noqa: SIM115
            self._flush_each = self._final is None and not _is_regular(self._raw)
            self._file = _compressed(self._raw, self.path)
        except OSError as error:
            raise self._refusal(error) from error

    def write(self, line: bytes) -> None:
        try:
            self._file.write(line)
            if self._flush_each:
                self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._refusal(error) from error

    def commit(self) -> None:
        """Finish the output and give the file its final name. Raises StorageError, and then leaves no file."""
        assert self._raw is not None
        try:
            if self._file is not self._raw:
                self._file.close()
            self._raw.flush()
            if self._staged and self._final:
                os.fsync(self._raw.fileno())
                self._raw.close()
                self._staged.replace(self._final)
            elif self.path != "-":
                self._raw.close()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.discard()
            raise self._refusal(error) from error

    def discard(self) -> None:
        """Close and remove the staged file."""
        # Closing flushes, and the flush fails if the last write failed.
        with suppress(OSError):
            if self._file is not self._raw:
                self._file.close()
        with suppress(OSError):
            if self._raw is not None and self.path != "-":
                self._raw.close()
        if self._staged:
            self._staged.unlink(missing_ok=True)

    def _refusal(self, error: OSError) -> StorageError:
        reason = error.strerror or str(error)
        remedy = "Free space or write elsewhere."
        if isinstance(error, FileNotFoundError):
            reason, remedy = "no such directory", f"Create it: mkdir -p {os.path.dirname(self.path) or '.'}"
        elif isinstance(error, PermissionError | IsADirectoryError):
            remedy = "Use another file."
        name = "<stdout>" if self.path == "-" else self.path
        return StorageError(f"{name}: cannot be written: {reason}. {remedy}")


def _compressed(raw: IO[bytes], path: str) -> Any:
    if path.lower().endswith(".gz"):
        # No name and time in the header, so that the same records give the same bytes.
        return gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0)
    if path.lower().endswith(".zst"):
        return zstandard(f"writing {path}").ZstdCompressor().stream_writer(raw, closefd=False)
    return raw


def regular_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, also for devices, pipes and folders, which are not opened."""
    _check_regular(path, path.stat())
    # Non-blocking, and checked again below: the file may have been replaced since.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _check_regular(path, os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def is_pipe(path: str | Path) -> bool:
    """Return whether a source can only be read once and in order: stdin, `<(…)`, a FIFO."""
    return str(path) == "-" or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def _is_regular(file: IO[bytes]) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:  # captured in memory
        return True
