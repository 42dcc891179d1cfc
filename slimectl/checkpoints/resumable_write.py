"""Resumable writing of weights in several files: groups tensors and reuses complete files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from slimectl.data.hashing import SHA256, Digest, damage_hash

Item = TypeVar("Item")

FILES, LEAST_FILE_BYTES, MOST_FILE_BYTES = 8, 512 * 1024**2, 4 * 1024**3

SYNCED_BYTES = 64 * 1024**2
"""Bytes that are flushed to disk at a time while a file is written."""

CACHED_BYTES = 1024**2
"""Bytes that are hashed and written at a time."""

FACTS = ".facts-"
"""Prefix of the metadata file that each finished file has while others are missing."""


def file_bytes(total: int) -> int:
    """Return the maximum file size for `total` bytes: an eighth, between LEAST_FILE_BYTES and MOST_FILE_BYTES.

    With several files an interruption loses little, and one file is flushed to disk while the next one is written.
    """
    return min(max(total // FILES, LEAST_FILE_BYTES), MOST_FILE_BYTES)


def one_ahead(loads: Iterable[Callable[[], Item]]) -> Iterator[Item]:
    """Yield the results of the calls in order. The next call runs while the last result is in use."""
    with ThreadPoolExecutor(1) as pool:
        ready: Future[Item] | None = None
        for load in loads:
            future = pool.submit(load)
            if ready is not None:
                yield ready.result()
            ready = future
        if ready is not None:
            yield ready.result()


def grouped(items: Iterable[Item], size: Callable[[Item], int], max_bytes: int) -> Iterator[list[Item]]:
    """Group consecutive items, with at most `max_bytes` or one item per group. Without items, yield one empty group."""
    group: list[Item] = []
    total = 0
    for item in items:
        if group and total + size(item) > max_bytes:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    yield group


class HashedFile:
    """A new file that is hashed, and flushed to disk by another thread, while it is written."""

    def __init__(self, file: BinaryIO, syncing: Executor) -> None:
        self._file = file
        self._syncing = syncing
        self._algorithm, self._hash = damage_hash()
        self._position = self._unsynced = 0
        self._sync: Future[None] | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CACHED_BYTES):  # hash and copy while the data is in the processor's cache
            part = view[start : start + CACHED_BYTES]
            self._hash.update(part)
            self._file.write(part)
            self._start_sync(len(part))
        self._position += len(view)
        return len(view)

    def _start_sync(self, count: int) -> None:
        """Start flushing the new bytes to disk while more are written, instead of all of them at the end."""
        self._unsynced += count
        if self._unsynced >= SYNCED_BYTES and (self._sync is None or self._sync.done()):
            self._finish_sync()
            self._unsynced, self._sync = 0, self._syncing.submit(os.fdatasync, self._file.fileno())

    def _finish_sync(self) -> None:
        """Wait for the flush. Raises its OSError, which the system reports only once."""
        if self._sync is not None:
            self._sync.result()

    def close(self) -> None:
        with self._file:  # close only when its descriptor is no longer in use
            self._finish_sync()

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> Digest:
        return self._algorithm, self._hash.hexdigest()


def write_parts(
    folder: Path, names: Sequence[str], write: Callable[[int, HashedFile], Any]
) -> tuple[list[Any], dict[str, Digest]]:
    """Write the files `names` in `folder` atomically. Return the result of `write` for each, and their digests.

    `write(i, file)` fills file i and returns a JSON-serializable result. Existing files, from an interrupted call with
    the same arguments, are kept with their results.
    """
    finished: list[Future[None]] = []
    with ThreadPoolExecutor(1) as finishing:
        for i, name in enumerate(names):
            if (folder / name).exists():
                continue
            staged = folder / f".part-{name}"
            with closing(HashedFile(staged.open("wb"), finishing)) as file:
                record = {"facts": write(i, file), "digest": file.digest()}
            (folder / f"{FACTS}{name}").write_text(json.dumps(record))
            finished.append(finishing.submit(_finish, staged, folder / name))
        for future in finished:
            future.result()
    records = [json.loads((folder / f"{FACTS}{name}").read_text()) for name in names]
    for name in names:
        (folder / f"{FACTS}{name}").unlink()
    # Older versions stored the digest under the name of its algorithm.
    digests = [tuple(entry.get("digest") or (SHA256, entry[SHA256])) for entry in records]
    return [entry["facts"] for entry in records], dict(zip(names, digests, strict=True))


def _finish(staged: Path, final: Path) -> None:
    """Rename a written file to its final name after it is flushed to disk."""
    with staged.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(staged, final)
