"""Weights in several files: which tensors go into which, and files that an interruption has left whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from slimectl.data.rundir import sha256

Item = TypeVar("Item")

FILES, LEAST_FILE_BYTES, MOST_FILE_BYTES = 8, 512 * 1024**2, 4 * 1024**3

FACTS = ".facts-"
"""Prefix of the note beside each finished file, as long as others are missing."""


def file_bytes(total: int) -> int:
    """How large the files of `total` bytes may get: an eighth, as far as that is neither small nor huge.

    An interruption then loses little, and hashing keeps up with writing: one file is hashed while the next is written.
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


def write_parts(
    folder: Path, names: Sequence[str], write: Callable[[int, Path], Any]
) -> tuple[list[Any], dict[str, str]]:
    """Make the files `names` of `folder`, each whole or not there; what `write` said of each, and their SHA-256.

    `write(i, path)` writes file i and returns facts about it that JSON can hold. A file that is there already, from an
    interrupted call with the same arguments, is kept, and so are its facts.
    """
    hashes: dict[str, Future[str]] = {}
    # One file is brought to the disk and hashed while the next is written: both let the interpreter's lock go.
    with ThreadPoolExecutor(1) as pool:
        for i, name in enumerate(names):
            note, staged = folder / f"{FACTS}{name}", folder / f".part-{name}"
            if not (folder / name).exists():
                note.write_text(json.dumps(write(i, staged)))
            hashes[name] = pool.submit(_finish, staged, folder / name)
        found = {name: future.result() for name, future in hashes.items()}
    facts = [json.loads((folder / f"{FACTS}{name}").read_text()) for name in names]
    for name in names:
        (folder / f"{FACTS}{name}").unlink()
    return facts, found


def _finish(staged: Path, final: Path) -> str:
    """Give a written file its name, once it is on the disk; its SHA-256."""
    if not final.exists():
        with staged.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(staged, final)
    return sha256(final)
