"""Weights in several files: which tensors go into which, and files that an interruption has left whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slimectl.data.rundir import sha256

Item = TypeVar("Item")

FACTS = ".facts-"
"""Prefix of the note beside each finished file, as long as others are missing."""


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
