"""Weights in several files: which tensors go into which, and files that an interruption has left whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from slimectl.data.rundir import sha256

Item = TypeVar("Item")

STEP_BYTES = 4 * 1024**2
MAX_FILE_BYTES = 1024**3
"""Small enough that an interruption loses little, and that hashing keeps up with writing."""

FACTS = ".facts-"
"""Prefix of the note beside each finished file, as long as others are missing."""


class InSteps:
    """A binary file to write large tensors to, a few megabytes at a time.

    One write of hundreds of megabytes into a new file took 5 to 8 times the CPU time of many small ones (Linux 6,
    ext4), and torch.save and safetensors hand over a tensor whole.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), STEP_BYTES):
            self._file.write(view[start : start + STEP_BYTES])
        return len(view)

    def flush(self) -> None:
        self._file.flush()


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
    # One file is hashed while the next is written: hashing lets the interpreter's lock go.
    with ThreadPoolExecutor(1) as pool:
        for i, name in enumerate(names):
            _make(folder, name, partial(write, i))
            hashes[name] = pool.submit(sha256, folder / name)
    facts = [json.loads((folder / f"{FACTS}{name}").read_text()) for name in names]
    for name in names:
        (folder / f"{FACTS}{name}").unlink()
    return facts, {name: future.result() for name, future in hashes.items()}


def _make(folder: Path, name: str, write: Callable[[Path], Any]) -> None:
    note, staged = folder / f"{FACTS}{name}", folder / f".part-{name}"
    if (folder / name).exists() and note.exists():
        return
    note.write_text(json.dumps(write(staged)))
    with staged.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(staged, folder / name)
