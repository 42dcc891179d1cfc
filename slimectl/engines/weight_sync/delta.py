"""Weight sync by deltas: a small file with the changes since the last push, applied to the engines' checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimectl.data.atomic_replace import storage_errors, write_text
from slimectl.data.ownership import remove_made
from slimectl.engines.weight_sync.base import Precision, drained, targets
from slimectl.engines.weight_sync.delta_apply import VERSION, apply_written, recover, staged_journal, weight_version
from slimectl.engines.weight_sync.delta_format import (
    CHUNK_BYTES,
    Change,
    Checksum,
    DeltaWriter,
    Difference,
    TensorRange,
    Versions,
    difference,
    release_mapped,
    tensor_ranges,
)
from slimectl.engines.weight_sync.disk import FileSync, Write, write_checkpoint
from slimectl.errors import CheckpointError
from slimectl.protocols import NamedTensors, WeightUpdateClient
from slimectl.system.deltas import RoundingComparer
from slimectl.types import Metrics

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(eq=False)
class DeltaSync(FileSync):
    """Keeps the checkpoint `folder`/current up to date by deltas. Each delta stays in `folder` until the next.

    The first push writes the checkpoint whole, and so does one whose delta does not fit. Engines read that directory.
    `encoding` is "xor" or "overwrite", `checksum` "xxh3-128", "blake2b" or "adler32".
    """

    encoding: str = "xor"
    checksum: str = "xxh3-128"

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
            versions = Versions(start, version, self.encoding, self.checksum)
            write = partial(
                write_delta, target=self._delta, base=self.current, versions=versions, dtype=self.dtype, journal=True
            )
            try:
                size = self.policy.consume_weights(write)
                apply_written(self.current)
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


def write_delta(
    tensors: NamedTensors, *, target: Path, base: Path, versions: Versions, dtype: Precision, journal: bool = False
) -> int:
    """Write the changes from the directory `base` to these tensors as the file `target`. Returns its size in bytes.

    `journal` also prepares `base` for apply_written. Raises CheckpointError if the tensors do not match.
    """
    staged, staged_in_base = target.with_name(f".tmp-{target.name}"), staged_journal(base)
    with drained(tensors) as stream, storage_errors(target):
        recover(base)
        if weight_version(base) != versions.start:
            raise CheckpointError(f"{base}: does not hold weights {versions.start}. Push whole weights.")
        tensor_regions, comparer = tensor_ranges(base), _Comparer(base, versions)
        writers = [DeltaWriter(staged, versions)]
        if journal:
            overwriting = replace(versions, encoding="overwrite")
            writers.append(DeltaWriter(staged_in_base, overwriting, compresses=False))
        try:
            for name, tensor, cast_dtype in targets(stream, dtype):
                region = tensor_regions.pop(name, None)
                if region is None or (region.code, region.shape) != (CODES.get(cast_dtype), tuple(tensor.shape)):
                    raise CheckpointError(f"{base}: {name} has another shape or dtype there. Push whole weights.")
                change, changed = comparer.compare(name, region, tensor, cast_dtype)
                for writer in writers:
                    writer.add(name, change, changed)
            if tensor_regions:
                raise CheckpointError(
                    f"{base}: {min(tensor_regions)} is not among the new weights. Push whole weights."
                )
            size, *_ = [writer.finish() for writer in writers]
            staged.rename(target)
            comparer.finish()
        except BaseException:
            staged_in_base.unlink(missing_ok=True)
            raise
        finally:
            for writer in writers:
                writer.close()
            staged.unlink(missing_ok=True)
    return size


_CHECKSUMS: dict[Path, tuple[str, str, dict[str, str]]] = {}
"""Version and kind of the tensor checksums that this process last computed for a checkpoint, for the next delta."""


class _Comparer:
    """Compares tensors with their bytes in the checkpoint `base`, in one pass over both."""

    def __init__(self, base: Path, versions: Versions) -> None:
        self._base, self._versions = base, versions
        version, kind, checksums = _CHECKSUMS.pop(base, ("", "", {}))
        is_start = (version, kind) == (versions.start, versions.checksum)
        self._before: dict[str, str] = checksums if is_start else {}
        self._after: dict[str, str] = {}
        self._rounding: RoundingComparer | None = None
        self._mapped_files: dict[Path, Any] = {}

    def compare(self, name: str, region: TensorRange, tensor: Tensor, dtype: torch.dtype) -> tuple[Change, Difference]:
        """Compare a tensor, cast to `dtype`. Use the difference before the next call."""
        flat, old_B = tensor.cpu().contiguous().view(-1), region.mapped(self._mapped_files)
        rounding = self._rounding_comparer() if (flat.dtype, dtype) == (torch.float32, torch.bfloat16) else None
        kind = self._versions.checksum
        # If these bytes have been damaged since, a copy would become different weights and reject the delta.
        before = None if name in self._before else Checksum(kind)
        after, parts = Checksum(kind), []
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
        _CHECKSUMS[self._base] = self._versions.end, self._versions.checksum, self._after


def _write_versioned(write: Write, version: str, path: Path, tensors: NamedTensors) -> None:
    write(path, tensors)
    write_text(path / VERSION, version + "\n")
