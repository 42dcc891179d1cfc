"""Weight sync by deltas: a small file with the changes since the last push, applied to the engines' checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimectl.data.atomic_replace import storage_errors, write_text
from slimectl.data.ownership import remove_made
from slimectl.engines.weight_sync.base import Precision, drained, targets
from slimectl.engines.weight_sync.delta_format import (
    CHUNK_BYTES,
    Change,
    DeltaFile,
    DeltaWriter,
    Difference,
    TensorRange,
    Versions,
    checksum,
    difference,
    release_mapped,
    tensor_ranges,
)
from slimectl.engines.weight_sync.disk import FileSync, Write, write_checkpoint
from slimectl.errors import CheckpointError
from slimectl.protocols import NamedTensors, WeightUpdateClient
from slimectl.system.deltas import RoundingComparer, change_numbers
from slimectl.types import Metrics

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


VERSION = "weight_version.txt"


@dataclass(eq=False)
class DeltaSync(FileSync):
    """Keeps the checkpoint `folder`/current up to date by deltas. Each delta stays in `folder` until the next.

    The first push writes the checkpoint whole, and so does one whose delta does not fit. Engines read that directory.
    """

    def __post_init__(self) -> None:
        self.current = self.folder / "current"
        self._version: str | None = None
        self._delta: Path | None = None

    def _push(self, workers: WeightUpdateClient, version: str) -> Metrics:
        metrics: Metrics = {"bytes": 0.0, "full": 0.0}
        delta = None
        if version != self._version:
            metrics = self._update_checkpoint(version)
            delta = None if metrics["full"] else self._delta
            if self.wrote is not None:
                self.wrote(delta or self.current, workers)
        try:
            with self.paused(workers) as watch:
                workers.load_disk(self.current, version=version, delta=delta)
        except BaseException:
            self._version = None  # push whole weights next, because these may be the cause
            raise
        return {**metrics, "pause_time": watch.seconds}

    def _update_checkpoint(self, version: str) -> Metrics:
        """Bring the checkpoint to `version` by a delta, or whole if a delta does not fit."""
        start, self._version = self._version, None
        if start is not None:
            previous, self._delta = self._delta, self.folder / f"{start}-to-{version}.delta"
            write = partial(write_delta, target=self._delta, base=self.current, versions=Versions(start, version))
            try:
                size = self.policy.consume_weights(partial(write, dtype=self.dtype))
                apply_delta(self.current, DeltaFile(self._delta))
            except CheckpointError:
                self._delta.unlink(missing_ok=True)
            else:
                if previous is not None and not self.keep_files:
                    previous.unlink(missing_ok=True)
                self._version = version
                return {"bytes": float(size), "full": 0.0}
        fill = partial(write_checkpoint, target=self.current, write=partial(_write_versioned, self.write, version))
        size = self.policy.consume_weights(partial(fill, dtype=self.dtype))
        self._version = version
        return {"bytes": float(size), "full": 1.0}

    def close(self) -> None:
        if not self.keep_files:
            release_mapped(self.current)
            _CHECKSUMS.pop(self.current, None)
            remove_made(self.current)
            if self._delta is not None:
                self._delta.unlink(missing_ok=True)
        self._version = self._delta = None


def write_delta(tensors: NamedTensors, *, target: Path, base: Path, versions: Versions, dtype: Precision) -> int:
    """Write the changes from the directory `base` to these tensors as the file `target`. Returns its size in bytes.

    Raises CheckpointError if the tensors do not match.
    """
    staged = target.with_name(f".tmp-{target.name}")
    with drained(tensors) as stream, storage_errors(target):
        if weight_version(base) != versions.start:
            raise CheckpointError(f"{base}: does not hold weights {versions.start}. Push whole weights.")
        tensor_regions, comparer = tensor_ranges(base), _Comparer(base, versions)
        writer = DeltaWriter(staged, versions)
        try:
            for name, tensor, cast_dtype in targets(stream, dtype):
                region = tensor_regions.pop(name, None)
                if region is None or (region.code, region.shape) != (CODES.get(cast_dtype), tuple(tensor.shape)):
                    raise CheckpointError(f"{base}: {name} has another shape or dtype there. Push whole weights.")
                writer.add(name, *comparer.compare(name, region, tensor, cast_dtype))
            if tensor_regions:
                raise CheckpointError(
                    f"{base}: {min(tensor_regions)} is not among the new weights. Push whole weights."
                )
            size = writer.finish()
            staged.rename(target)
            comparer.finish()
        finally:
            writer.close()
            staged.unlink(missing_ok=True)
    return size


def apply_delta(folder: Path, delta: DeltaFile) -> None:
    """Bring a directory to the version of a delta that was written from its files.

    It has no version until then, so no other delta is written from it if this is interrupted. Raises CheckpointError.
    """
    with storage_errors(folder):
        if weight_version(folder) != delta.start:
            raise CheckpointError(f"{folder}: does not hold weights {delta.start}. Push whole weights.")
        tensor_regions, mapped_files = tensor_ranges(folder), dict[Path, Any]()
        (folder / VERSION).unlink()
        changed = {name: tensor_regions[name] for name, change in delta.changes.items() if change.changed}
        for name, region in changed.items():
            gaps_C, bits_C = delta.gaps(name, region.width)
            change_numbers(region.mapped(mapped_files).view(bits_C.dtype), gaps_C, bits_C)
        for file in {region.file for region in changed.values()}:
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())
        write_text(folder / VERSION, delta.versions.end + "\n")


def weight_version(folder: Path) -> str | None:
    """Read the weight version that a directory records, or None without one."""
    file = folder / VERSION
    return file.read_text().strip() if file.exists() else None


_CHECKSUMS: dict[Path, tuple[str, dict[str, str]]] = {}
"""Version and checksums of the tensors that this process last computed for a checkpoint, for the next delta."""


class _Comparer:
    """Compares tensors with their bytes in the checkpoint `base`, in one pass over both."""

    def __init__(self, base: Path, versions: Versions) -> None:
        self._base, self._versions = base, versions
        version, checksums = _CHECKSUMS.pop(base, ("", {}))
        self._before: dict[str, str] = checksums if version == versions.start else {}
        self._after: dict[str, str] = {}
        self._rounding: RoundingComparer | None = None
        self._mapped_files: dict[Path, Any] = {}

    def compare(self, name: str, region: TensorRange, tensor: Tensor, dtype: torch.dtype) -> tuple[Change, Difference]:
        """Compare a tensor, cast to `dtype`. Use the difference before the next call."""
        flat, old_B = tensor.cpu().contiguous().view(-1), region.mapped(self._mapped_files)
        rounding = self._rounding_comparer() if (flat.dtype, dtype) == (torch.float32, torch.bfloat16) else None
        # If these bytes have been damaged since, a copy would become different weights and reject the delta.
        before = None if name in self._before else checksum()
        after, parts = checksum(), []
        for part in region.chunks():
            first = part.start // region.width
            numbers_N, old_part_B = flat[first : part.stop // region.width], old_B[part]
            if rounding is not None:
                new, *columns = rounding.compare(numbers_N, old_part_B.view("<u2"), first=first)
                is_single = region.nbytes <= CHUNK_BYTES
                parts.append(Difference(*(column if is_single else column.copy() for column in columns)))
            else:
                new = numbers_N.to(dtype).view(torch.uint8).numpy()
                parts.append(difference(old_part_B, new, region.width, first=first))
            if before is not None:
                before.update(old_part_B)
            after.update(new)
        self._after[name] = after.hexdigest()
        first_checksum = self._before[name] if before is None else before.hexdigest()
        change = Change(region.code, list(region.shape), first_checksum, self._after[name])
        return change, Difference.joined(parts)

    def _rounding_comparer(self) -> RoundingComparer | None:
        if self._rounding is None:
            self._rounding = RoundingComparer(CHUNK_BYTES // 2)
        return self._rounding if self._rounding.exists else None

    def finish(self) -> None:
        """Keep the checksums of all tensors for the next delta."""
        _CHECKSUMS[self._base] = self._versions.end, self._after


def _write_versioned(write: Write, version: str, path: Path, tensors: NamedTensors) -> None:
    write(path, tensors)
    write_text(path / VERSION, version + "\n")
