"""Weights in one layout in, weights in another out."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.data.rundir import refuse_existing, write_folder
from slimectl.errors import CheckpointError
from slimectl.ports import NamedTensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Facts = tuple[tuple[int, ...], str, str]
"""Shape, dtype and SHA-256 of one tensor."""


def convert(
    source: NamedTensors,
    target: Path,
    *,
    write: Callable[[Path, NamedTensors], None],
    companions: Callable[[Path], None],
    reread: Callable[[Path], NamedTensors] | None = None,
    dtype: torch.dtype | None = None,
    force: bool = False,
    sign: Callable[[dict[str, int]], dict[str, Any]] | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, int]:
    """Stream the tensors of `source` into the folder `target`; counts of tensors, parameters and bytes.

    `write` lays the tensors down in a folder, `companions` adds what belongs to them (config, tokenizer). With
    `reread` the written folder is read back before it gets its name: every tensor there once, shapes and dtypes equal,
    values equal to the last bit to what was read, after the cast of floating tensors to `dtype`. `sign` makes of the
    counts what the manifest says besides its list of files; `progress` hears each name.

    The folder is whole under its name, or not there. Raises SettingsError if `target` holds something and not `force`,
    CheckpointError if a tensor comes twice or the written ones differ, StorageError if writing fails.
    """
    refuse_existing(target, force=force)
    facts: dict[str, Any] = {}
    counts = {"tensors": 0, "parameters": 0, "bytes": 0}
    seen: dict[str, Facts | None] = {}

    def cast() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in source:
            if name in seen:
                raise CheckpointError(f"{name}: comes twice in the checkpoint; download or convert it again")
            kept = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            seen[name] = _facts(kept) if reread else None
            counts["tensors"] += 1
            counts["parameters"] += kept.numel()
            counts["bytes"] += kept.nbytes
            if progress:
                progress(name)
            yield name, kept

    def fill(staged: Path) -> None:
        _told_as_oserror(lambda: write(staged, cast()))
        companions(staged)
        if reread:
            _compare(seen, reread(staged))
        facts.update(sign(counts) if sign else {"counts": counts})

    write_folder(target, fill, about=facts)
    return counts


def _compare(expected: dict[str, Facts | None], written: Iterable[tuple[str, Tensor]]) -> None:
    found = {name: _facts(tensor) for name, tensor in written}
    if found.keys() != expected.keys():
        odd = sorted(found.keys() ^ expected.keys())
        raise CheckpointError(f"verifying: {odd[0]} and {len(odd) - 1} others are not in both; nothing was kept")
    for name, (shape, dtype, digest) in found.items():
        if (shape, dtype, digest) != expected[name]:
            raise CheckpointError(
                f"verifying: {name}, {dtype} {shape}, is not what was read; nothing was kept; check the disk"
            )


def _facts(tensor: Tensor) -> Facts:
    import torch

    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return tuple(tensor.shape), str(tensor.dtype), hashlib.sha256(values).hexdigest()


def _told_as_oserror(work: Callable[[], None]) -> None:
    """safetensors 0.8 reports a full disk as an error of its own, with the number in its words only."""
    try:
        work()
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None or isinstance(error, OSError):
            raise
        code = int(number.group(1))
        raise OSError(code, os.strerror(code)) from error
