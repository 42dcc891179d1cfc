"""Weights in several files: which tensors go into which, and files that an interruption has left whole."""

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
"""Bytes from which handing them to another thread pays."""

FACTS = ".facts-"
"""Prefix of the note beside each finished file, as long as others are missing."""


def file_bytes(total: int) -> int:
    """How large the files of `total` bytes may get: an eighth, as far as that is neither small nor huge.

    An interruption then loses little, and one file is brought to the disk while the next is written.
    """
    return min(max(total // FILES, LEAST_FILE_BYTES), MOST_FILE_BYTES)


def one_ahead(loads: Iterable[Callable[[], Item]]) -> Iterator[Item]:
    """What each call returns, in order; the next is made while the last is in use."""
    with ThreadPoolExecutor(1) as pool:
        ready: Future[Item] | None = None
        for load in loads:
            coming = pool.submit(load)
            if ready is not None:
                yield ready.result()
            ready = coming
        if ready is not None:
            yield ready.result()


def grouped(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Consecutive items together, each group of at most `most` bytes or one item; one empty group of no items."""
    group: list[Item] = []
    total = 0
    for item in items:
        if group and total + size(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    yield group


class HashedFile:
    """A new file that is hashed while it is written: both take their time outside of the interpreter's lock."""

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
        hashing.result()  # the memory is the caller's again as soon as this returns
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
    """Make the files `names` of `folder`, each whole or not there; what `write` said of each, and their SHA-256.

    `write(i, file)` fills file i and returns facts about it that JSON can hold. A file that is there already, from an
    interrupted call with the same arguments, is kept, and so are its facts.
    """
    finished: list[Future[None]] = []
    with ThreadPoolExecutor(1) as hashing, ThreadPoolExecutor(1) as finishing:
        for i, name in enumerate(names):
            if (folder / name).exists():
                continue
            staged = folder / f".part-{name}"
            with staged.open("wb") as raw:
                file = HashedFile(raw, hashing)
                said = {"facts": write(i, file), "sha256": file.sha256()}
            (folder / f"{FACTS}{name}").write_text(json.dumps(said))
            finished.append(finishing.submit(_finish, staged, folder / name))
        for future in finished:
            future.result()
    notes = [json.loads((folder / f"{FACTS}{name}").read_text()) for name in names]
    for name in names:
        (folder / f"{FACTS}{name}").unlink()
    return [note["facts"] for note in notes], {name: note["sha256"] for name, note in zip(names, notes, strict=True)}


def _finish(staged: Path, final: Path) -> None:
    """Give a written file its name, once it is on the disk."""
    with staged.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(staged, final)
