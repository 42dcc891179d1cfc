"""Resumable output files: interrupted work continues where it stopped."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from slimectl.data.io import AtomicWriter
from slimectl.data.jsonl import encode_sample, read_sample
from slimectl.data.locks import Lock
from slimectl.data.manifest import Manifest, is_manifest, manifest_path
from slimectl.data.ownership import file_size
from slimectl.errors import RecordError, StorageError
from slimectl.types import Sample

FLUSH_S = 0.5
"""Flush interval in seconds: the most work that a killed process loses."""


def can_be_resumable(out: str) -> bool:
    """Return whether `out` is, or will be, a regular file, so that writing it can be resumed."""
    try:
        return out != "-" and stat.S_ISREG(os.stat(out).st_mode)
    except OSError:
        return Path(out).resolve().parent.is_dir()


def _partial_path(final: Path) -> Path:
    """Return the path of the unfinished output: OUT.partial, or OUT.partial.1, … if another program owns that file.

    slimectl's own file has a manifest next to it, or is empty.
    """
    path, number = final.with_name(f"{final.name}.partial"), 0
    while not is_manifest(manifest_path(path)) and (file_size(path) or os.path.lexists(manifest_path(path))):
        number += 1
        path = final.with_name(f"{final.name}.partial.{number}")
    return path


def partial_output(out: Path) -> Path | None:
    """Return the unfinished file of an output that a stage is writing or left incomplete, or None."""
    path = _partial_path(Path(os.path.realpath(out)))
    return path if file_size(path) and is_manifest(manifest_path(path)) else None


class ResumableOutput:
    """Resumable writer of samples to the file `out`. Until `commit` they are in `out`.partial, next to a manifest.

    >>> with ResumableOutput("scored.jsonl", manifest) as partial:  # doctest: +SKIP
    ...     before = list(partial.done())
    ...     partial.write(sample)
    ...     partial.commit()

    Without `commit` the file stays, and `done` returns its samples the next time the same work starts.
    """

    def __init__(self, out: str, manifest: Manifest) -> None:
        self._out = out
        # Links are resolved, as for every output.
        final = Path(os.path.realpath(out))
        self._final, self.path = final, _partial_path(final)
        self._manifest = manifest
        self._lock = Lock(final.with_name(f".{final.name}.lock"), f"{out}: is being written")
        self._file: BinaryIO | None = None
        self._flushed = 0.0
        self.count = 0

    def __enter__(self) -> ResumableOutput:
        """Lock the output. Raises SettingsError if another writer is active."""
        if self.path.parent.is_dir():  # else the first write reports the missing folder
            self._lock.acquire()
        return self

    def drop(self) -> None:
        """Discard the unfinished output."""
        self._unlink()

    def done(self, *, whole_groups: bool = False) -> Iterator[Sample]:
        """Yield the samples of the interrupted attempt, if it was the same work. An incomplete last line is truncated.

        With `whole_groups` the last group is dropped too, because some of its samples may be missing.
        """
        if not self._manifest.unchanged(self.path):
            self._unlink()
            return
        complete_bytes, pending = 0, list[tuple[Sample, int]]()
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    sample = read_sample(line, location=f"{self.path}:{number}", position=number - 1)
                except RecordError:
                    break
                if not line.endswith(b"\n"):
                    break
                if pending and not (whole_groups and pending[0][0].group_index == sample.group_index):
                    for earlier, size in pending:
                        complete_bytes, self.count = complete_bytes + size, self.count + 1
                        yield earlier
                    pending = []
                pending.append((sample, len(line)))
        for earlier, size in [] if whole_groups else pending:
            complete_bytes, self.count = complete_bytes + size, self.count + 1
            yield earlier
        os.truncate(self.path, complete_bytes)

    def write(self, sample: Sample) -> None:
        """Append a sample. Raises StorageError for OS errors, RecordError for values that are not JSON."""
        line = encode_sample(sample, location=f"{self._out}: record {self.count + 1}")
        try:
            if self._file is None:
                self._file = open(self.path, "ab")  # noqa: SIM115  closed by __exit__ and commit
                # Before the first record, so that the file is identified even if the process is killed.
                self._manifest.write(self.path, counts={})
            self._file.write(line)
            if time.monotonic() - self._flushed > FLUSH_S:
                self._file.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            raise self._refusal(error) from error
        self.count += 1

    def commit(self) -> None:
        """Finish the output: give the file its final name, and compress it if it has a suffix of a compressed file."""
        try:
            self._close()
            if self._out.lower().endswith((".gz", ".zst")):
                self._compress()
            else:
                with open(self.path, "rb") as file:
                    os.fsync(file.fileno())
                self.path.replace(self._final)
        except OSError as error:
            raise self._refusal(error) from error
        self._unlink()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._close()
        except OSError as refused:
            if kind is None:
                raise self._refusal(refused) from refused
        if self.count == 0:
            self._unlink()
        self._lock.release()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _compress(self) -> None:
        sink = AtomicWriter(self._out)
        sink.open()
        try:
            with open(self.path, "rb") as file:
                while chunk := file.read(1 << 20):
                    sink.write(chunk)
            sink.commit()
        except BaseException:
            sink.discard()
            raise

    def _unlink(self) -> None:
        self.path.unlink(missing_ok=True)
        manifest_path(self.path).unlink(missing_ok=True)

    def _refusal(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self.path}: cannot be written: {error.strerror or error}. Free space or write elsewhere."
        )
