"""Converts weights from one checkpoint layout to another and verifies the result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.data.atomic_replace import refuse_existing
from slimectl.data.hashing import Digest
from slimectl.data.run_dir import write_folder
from slimectl.errors import CheckpointError
from slimectl.protocols import NO_PROGRESS, Progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slimectl.protocols import Weights

Hashes = Mapping[str, Digest]
"""Digest by file name."""


@dataclass(frozen=True)
class Output:
    """How the folder of converted weights is written and verified.

    `companions` copies the files that belong to the weights (config, tokenizer), then `write` writes the tensors.
    With `reread`, the written folder is read back: every tensor must exist, with equal shape, dtype and bits.
    `check(folder)` may verify more.
    """

    write: Callable[[Path, Weights], Hashes | None]
    companions: Callable[[Path], None]
    reread: Callable[[Path], Weights] | None = None
    check: Callable[[Path], None] | None = None


class HashingWeights:
    """Wraps weights, counts the tensors that are read, and records the SHA-256 of each."""

    def __init__(self, weights: Weights, *, hashing: bool, progress: Progress = NO_PROGRESS) -> None:
        self._weights = weights
        self._hashing = hashing
        self._progress = progress
        self._names: set[str] = set()
        self._digests: dict[str, str] = {}

    def forms(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._weights.forms()

    def get(self, name: str) -> Tensor:
        tensor = self._weights.get(name)
        if self._hashing:
            self._digests[name] = digest(tensor)
        self._names.add(name)
        self._progress.reach(len(self._names))
        return tensor

    def hash(self, name: str) -> str:
        """Return the SHA-256 of a tensor. Reads the tensor if it was not read before (its shard already existed)."""
        return self._digests.get(name) or digest(self._weights.get(name))


def convert(
    source: Weights,
    target: Path,
    output: Output,
    *,
    force: bool = False,
    sign: Callable[[dict[str, int]], dict[str, Any]] | None = None,
    resume: str | None = None,
    progress: Progress = NO_PROGRESS,
) -> dict[str, int]:
    """Write the tensors of `source` into the folder `target`. Return counts of tensors, parameters and bytes.

    `output` verifies the written folder before it is renamed to `target`. `sign` turns the counts into further fields
    of the manifest. `progress` counts the tensors in each phase. `resume` identifies the conversion, so that a later
    call continues an interrupted one.

    `target` is complete or does not exist. Raises SettingsError if `target` is not empty and `force` is not set,
    CheckpointError if the written tensors differ, StorageError if writing fails.
    """
    refuse_existing(target, force=force)
    witness = HashingWeights(source, hashing=output.reread is not None, progress=progress)
    forms = source.forms()
    counts = {
        "tensors": len(forms),
        "parameters": sum(prod(shape) for shape, _ in forms.values()),
        "bytes": sum(prod(shape) * dtype.itemsize for shape, dtype in forms.values()),
    }
    manifest_fields: dict[str, Any] = {}

    def fill(staged: Path) -> Hashes | None:
        output.companions(staged)
        with progress.phase("writing"):
            progress.expect(len(forms))
            hashes = output.write(staged, witness)
            progress.reach(len(forms))  # tensors of an interrupted conversion were not read again
        if output.reread:
            with progress.phase("verifying"):
                progress.expect(len(forms))
                compare(witness, output.reread(staged), progress=progress)
        if output.check:
            with progress.phase("comparing logits"):
                output.check(staged)
        manifest_fields.update(sign(counts) if sign else {"counts": counts})
        return hashes

    write_folder(target, fill, manifest_fields=manifest_fields, resume=resume)
    return counts


def compare(expected: HashingWeights, actual: Weights, *, progress: Progress = NO_PROGRESS) -> None:
    """Raise CheckpointError unless `actual` has exactly the expected tensors, equal to the last bit."""
    expected_forms, actual_forms = expected.forms(), actual.forms()
    if actual_forms.keys() != expected_forms.keys():
        mismatched = sorted(actual_forms.keys() ^ expected_forms.keys())
        raise CheckpointError(
            f"verifying: {mismatched[0]} and {len(mismatched) - 1} others are not in both. No output was kept"
        )
    for count, (name, (shape, dtype)) in enumerate(actual_forms.items()):
        progress.reach(count)
        if (tuple(shape), dtype) != expected_forms[name] or digest(actual.get(name)) != expected.hash(name):
            raise CheckpointError(
                f"verifying: {name}, {dtype} {tuple(shape)}, differs from what was read. No output was kept. "
                f"Check the disk"
            )


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    import torch

    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(values).hexdigest()
