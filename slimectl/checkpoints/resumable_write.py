"""Resumable writing of weights in several files: grouping of tensors, and reuse of complete files."""

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
"""Bytes that are brought to the disk at a time while a file is written."""

CACHED_BYTES = 1024**2
"""Bytes that are hashed and written at a time."""

FACTS = ".facts-"
"""Prefix of the metadata file beside each finished file, while others are missing."""


def file_bytes(total: int) -> int:
    """Maximum file size for `total` bytes: an eighth, within LEAST_FILE_BYTES and MOST_FILE_BYTES.

    An interruption then loses little, and one file is flushed to disk while the next is written.
    """
    return min(max(total // FILES, LEAST_FILE_BYTES), MOST_FILE_BYTES)


def one_ahead(loads: Iterable[Callable[[], Item]]) -> Iterator[Item]:
    """Yield the results of the calls, in order; the next call runs while the last result is in use."""
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
    """Group consecutive items: at most `max_bytes` or one item per group; one empty group if there are no items."""
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
    """A new file that is hashed, and brought to the disk by another thread, while it is written."""

    def __init__(self, file: BinaryIO, syncing: Executor) -> None:
        self._file = file
        self._syncing = syncing
        self._algorithm, self._hash = damage_hash()
        self._position = self._unsynced = 0
        self._sync: Future[None] | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CACHED_BYTES):  # hashed and copied while in the processor's cache
            part = view[start : start + CACHED_BYTES]
            self._hash.update(part)
            self._file.write(part)
            self._start_sync(len(part))
        self._position += len(view)
        return len(view)

    def _start_sync(self, count: int) -> None:
        """Let the disk write what is new while more is coming, rather than all of it at the end."""
        self._unsynced += count
        if self._unsynced >= SYNCED_BYTES and (self._sync is None or self._sync.done()):
            self._finish_sync()
            self._unsynced, self._sync = 0, self._syncing.submit(os.fdatasync, self._file.fileno())

    def _finish_sync(self) -> None:
        """Wait for what the disk writes. Raises its OSError, which the system reports once."""
        if self._sync is not None:
            self._sync.result()

    def close(self) -> None:
        with self._file:  # closed once its descriptor is not in use
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
    """Write the files `names` of `folder` atomically; returns the result of `write` for each, and their digests.

    `write(i, file)` fills file i and returns a result that JSON can represent. A file that exists, from an interrupted
    call with the same arguments, is kept with its result.
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
    # A file of a conversion that an older version began has the digest under its algorithm's name.
    digests = [tuple(entry.get("digest") or (SHA256, entry[SHA256])) for entry in records]
    return [entry["facts"] for entry in records], dict(zip(names, digests, strict=True))


def _finish(staged: Path, final: Path) -> None:
    """Rename a written file to its final name, after it is flushed to disk."""
    with staged.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(staged, final)
