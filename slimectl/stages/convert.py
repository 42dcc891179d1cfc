"""Weights in one layout in, weights in another out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.data.replacing import refuse_existing
from slimectl.data.rundir import write_folder
from slimectl.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slimectl.ports import Weights

Hashes = Mapping[str, str]
"""File name to SHA-256."""


class Witness:
    """Weights that remember, by SHA-256, what they gave away."""

    def __init__(self, weights: Weights, *, hashing: bool, progress: Callable[[str], None] | None = None) -> None:
        self._weights = weights
        self._hashing = hashing
        self._progress = progress
        self._seen: dict[str, str] = {}

    def forms(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._weights.forms()

    def get(self, name: str) -> Tensor:
        tensor = self._weights.get(name)
        if self._hashing:
            self._seen[name] = digest(tensor)
        if self._progress:
            self._progress(name)
        return tensor

    def hash(self, name: str) -> str:
        """The SHA-256 of a tensor, read now if it was not asked for (its shard was there already)."""
        return self._seen.get(name) or digest(self._weights.get(name))


def convert(
    source: Weights,
    target: Path,
    *,
    write: Callable[[Path, Weights], Hashes | None],
    companions: Callable[[Path], None],
    reread: Callable[[Path], Weights] | None = None,
    check: Callable[[Weights, Path], None] | None = None,
    force: bool = False,
    sign: Callable[[dict[str, int]], dict[str, Any]] | None = None,
    resume: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, int]:
    """Write the tensors of `source` into the folder `target`; counts of tensors, parameters and bytes.

    `companions` adds what belongs to the weights (config, tokenizer), then `write` lays the tensors down in the folder.
    With `reread` the written folder is read back before it gets its name: every tensor there, shapes and dtypes equal,
    values equal to the last bit; `check(source, folder)` may look further. `sign` makes of the counts what the manifest
    says besides its list of files; `progress` hears each name. `resume` names the work, so that another call goes on
    where one was interrupted.

    The folder is whole under its name, or not there. Raises SettingsError if `target` holds something and not `force`,
    CheckpointError if the written tensors differ, StorageError if writing fails.
    """
    refuse_existing(target, force=force)
    witness = Witness(source, hashing=reread is not None, progress=progress)
    forms = source.forms()
    counts = {
        "tensors": len(forms),
        "parameters": sum(prod(shape) for shape, _ in forms.values()),
        "bytes": sum(prod(shape) * dtype.itemsize for shape, dtype in forms.values()),
    }
    facts: dict[str, Any] = {}

    def fill(staged: Path) -> Hashes | None:
        companions(staged)
        hashes = write(staged, witness)
        if reread:
            compare(witness, reread(staged))
        if check:
            check(source, staged)
        facts.update(sign(counts) if sign else {"counts": counts})
        return hashes

    write_folder(target, fill, manifest_fields=facts, resume=resume)
    return counts


def compare(expected: Witness, written: Weights) -> None:
    """Raises CheckpointError unless `written` holds the expected tensors, and no others, to the last bit."""
    forms, found = expected.forms(), written.forms()
    if found.keys() != forms.keys():
        odd = sorted(found.keys() ^ forms.keys())
        raise CheckpointError(f"verifying: {odd[0]} and {len(odd) - 1} others are not in both; nothing was kept")
    for name, (shape, dtype) in found.items():
        if (tuple(shape), dtype) != forms[name] or digest(written.get(name)) != expected.hash(name):
            raise CheckpointError(
                f"verifying: {name}, {dtype} {tuple(shape)}, is not what was read; nothing was kept; check the disk"
            )


def digest(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's bytes."""
    import torch

    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(values).hexdigest()
