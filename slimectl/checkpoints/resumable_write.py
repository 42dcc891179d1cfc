"""Resumable writing of weights in several files: grouping of tensors, and reuse of complete files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

Item = TypeVar("Item")

FILES, LEAST_FILE_BYTES, MOST_FILE_BYTES = 8, 512 * 1024**2, 4 * 1024**3

WORTH_A_THREAD = 65536
"""Smallest number of bytes that is worth another thread."""

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
    """A new file that is hashed while it is written: both run without the interpreter's lock."""

    def __init__(self, file: BinaryIO, pool: Executor) -> None:
        self._file = file
        self._pool = pool
        self._sha = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if len(view) < WORTH_A_THREAD:
            self._sha.update(view)
            return self._file.write(view)
        hashing = self._pool.submit(self._sha.update, view)
        count = self._file.write(view)
        hashing.result()  # the caller may reuse the memory after this returns
        return count

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def sha256(self) -> str:
        return self._sha.hexdigest()


def write_parts(
    folder: Path, names: Sequence[str], write: Callable[[int, HashedFile], Any]
) -> tuple[list[Any], dict[str, str]]:
    """Write the files `names` of `folder` atomically; returns the result of `write` for each, and their SHA-256.

    `write(i, file)` fills file i and returns a result that JSON can represent. A file that exists, from an interrupted
    call with the same arguments, is kept with its result.
    """
    finished: list[Future[None]] = []
    with ThreadPoolExecutor(1) as hashing, ThreadPoolExecutor(1) as finishing:
        for i, name in enumerate(names):
            if (folder / name).exists():
                continue
            staged = folder / f".part-{name}"
            with staged.open("wb") as raw:
                file = HashedFile(raw, hashing)
                record = {"facts": write(i, file), "sha256": file.sha256()}
            (folder / f"{FACTS}{name}").write_text(json.dumps(record))
            finished.append(finishing.submit(_finish, staged, folder / name))
        for future in finished:
            future.result()
    records = [json.loads((folder / f"{FACTS}{name}").read_text()) for name in names]
    for name in names:
        (folder / f"{FACTS}{name}").unlink()
    return [entry["facts"] for entry in records], {
        name: entry["sha256"] for name, entry in zip(names, records, strict=True)
    }


def _finish(staged: Path, final: Path) -> None:
    """Rename a written file to its final name, after it is flushed to disk."""
    with staged.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(staged, final)
