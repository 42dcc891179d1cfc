"""Applies a delta in place to a checkpoint, whole or not at all."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from slimectl.data.atomic_replace import storage_errors, sync_folder, write_text
from slimectl.errors import CheckpointError
from slimectl.native.deltas import change_numbers
from slimectl.weight_sync.delta_format import (
    CHUNK_BYTES,
    Checksum,
    DeltaFile,
    DeltaWriter,
    Difference,
    TensorRange,
    tensor_ranges,
)

JOURNAL = ".slimectl-delta"
"""Journal of an unfinished delta: it is completed before anything else."""
VERSION = "weight_version.txt"


def apply_delta(delta: Path, folder: Path) -> None:
    """Bring the Hugging Face directory `folder` from the delta's first version to its last.

    No file is changed before the checksum of every tensor has been verified, before the delta and after it. The new
    values are then written to a journal beside the files: after a crash at any moment the next call continues from
    there. A directory that has the last version already stays unchanged.

    Raises CheckpointError where the directory does not fit the delta; it is as before.
    """
    folder = Path(folder)
    with storage_errors(folder):
        recover(folder)
        tensor_regions, change = tensor_ranges(folder), DeltaFile(delta)
        versions = change.versions
        current = weight_version(folder)
        if current not in (None, versions.start, versions.end):
            raise CheckpointError(
                f"{folder}: holds weights {current}, the delta goes from {versions.start}; push whole ones"
            )
        if current == versions.end and _matches(change, tensor_regions):
            return
        staged = staged_journal(folder)
        try:
            _prepare(change, tensor_regions, staged)
            _commit(folder, staged)
        finally:
            staged.unlink(missing_ok=True)
        _roll_forward(folder, tensor_regions, checked=True)


def recover(folder: Path) -> None:
    """Finish a delta that a crash interrupted. Raises CheckpointError if the files have been changed since."""
    if (folder / JOURNAL).exists():
        tensor_regions = tensor_ranges(folder)
        _roll_forward(folder, tensor_regions, checked=False)


def weight_version(folder: Path) -> str | None:
    """Read the weight version that a directory records; None without one."""
    file = folder / VERSION
    return file.read_text().strip() if file.exists() else None


def apply_written(folder: Path) -> None:
    """Bring the directory to the version of the delta that write_delta has just written from it, with a journal.

    The journal is of these very files, so their checksums are not computed again. Raises CheckpointError without it.
    """
    with storage_errors(folder):
        staged = staged_journal(folder)
        if not staged.exists():
            raise CheckpointError(f"{folder}: no delta was written for it; push whole weights")
        _commit(folder, staged)
        journal, tensor_regions = DeltaFile(folder / JOURNAL), tensor_ranges(folder)
        (folder / VERSION).unlink(missing_ok=True)
        changed = [name for name, change in journal.changes.items() if change.changed]
        mapped_files: dict[Path, Any] = {}
        for name in changed:
            region = tensor_regions[name]
            gaps_C, values_C = journal.gaps(name, region.width)
            change_numbers(region.mapped(mapped_files).view(values_C.dtype), gaps_C, values_C, is_xor=False)
        _finish(folder, journal, {tensor_regions[name].file for name in changed})


def staged_journal(folder: Path) -> Path:
    """Return the path of a journal that nothing depends on yet."""
    return folder / f".tmp-{JOURNAL}"


def _commit(folder: Path, staged: Path) -> None:
    """Name the journal: from here on the delta will be applied, whatever happens."""
    with staged.open("rb+") as file:
        os.fsync(file.fileno())
    staged.rename(folder / JOURNAL)
    sync_folder(folder)


def _prepare(delta: DeltaFile, tensor_regions: dict[str, TensorRange], journal: Path) -> None:
    """Verify every tensor, and write the changes as new bits: those can be applied twice, an xor cannot."""
    _check_forms(delta, tensor_regions)
    versions = delta.versions
    overwriting = dataclasses.replace(versions, encoding="overwrite")
    writer = DeltaWriter(journal, overwriting, compresses=False)
    try:
        for name, change in delta.changes.items():
            region = tensor_regions[name]
            before, after = Checksum(versions.checksum), Checksum(versions.checksum)
            patch = Patch(delta, name, region)
            new_values = []
            for _, data_B, new_C in patch.chunks(before):
                after.update(data_B)
                new_values.append(new_C)
            if before.hexdigest() != change.before:
                raise CheckpointError(
                    f"{region.file}: {name} is not as the delta from {versions.start} expects it; push whole weights"
                )
            if after.hexdigest() != change.after:
                raise CheckpointError(f"{delta.path}: {name} does not become what it should; push whole weights")
            new_C = np.concatenate(new_values) if new_values else patch.values_C
            writer.add(name, change, Difference(patch.indices_C, new_C, new_C))
        writer.finish()
    finally:
        writer.close()


class Patch:
    """Reads a tensor of a checkpoint with a delta's changes: `values_C` at `indices_C`, in the delta's encoding."""

    def __init__(self, delta: DeltaFile, name: str, region: TensorRange) -> None:
        self.indices_C, self.values_C = delta.changed(name, region.width)
        self._region, self._is_xor = region, delta.is_xor

    def chunks(self, before: Checksum | None = None, *, all_of_them: bool = True) -> Iterator[tuple[int, Any, Any]]:
        """Yield (first byte, new bytes, new values of changed numbers) of each chunk, or only of those that change.

        The bytes are overwritten by the next chunk. `before` gets the old bytes.
        """
        region, width = self._region, self._region.width
        buffer_B = np.empty(min(CHUNK_BYTES, region.nbytes), np.uint8)
        with region.file.open("rb", buffering=0) as stream:
            for part in region.chunks():
                low, high = np.searchsorted(self.indices_C, [part.start // width, part.stop // width])
                if low == high and not all_of_them:
                    continue
                data_B = buffer_B[: part.stop - part.start]
                region.read_into(stream, data_B.data, part.start)
                if before is not None:
                    before.update(data_B)
                numbers_N = data_B.view(f"<u{width}")
                local_C, values_C = self.indices_C[low:high] - part.start // width, self.values_C[low:high]
                new_C = numbers_N[local_C] ^ values_C if self._is_xor else values_C
                numbers_N[local_C] = new_C
                yield part.start, data_B, new_C


def _check_forms(delta: DeltaFile, tensor_regions: dict[str, TensorRange]) -> None:
    for name in tensor_regions.keys() ^ delta.changes.keys():
        raise CheckpointError(f"{delta.path}: {name} is in it or in the checkpoint only; push whole weights")
    for name, change in delta.changes.items():
        region = tensor_regions[name]
        if (region.code, list(region.shape)) != (change.code, change.shape):
            raise CheckpointError(
                f"{region.file}: {name} is {region.code} {list(region.shape)}, the delta is for {change.code}"
                f" {change.shape}; push whole weights"
            )


def _matches(delta: DeltaFile, tensor_regions: dict[str, TensorRange]) -> bool:
    """Whether the directory has the state after the delta."""
    return all(delta.matches(name, tensor_regions[name].read()) for name in delta.changes)


def _roll_forward(folder: Path, tensor_regions: dict[str, TensorRange], *, checked: bool) -> None:
    """Write the journal's values into the files; `checked`: it was written a moment ago, from these same files."""
    journal = DeltaFile(folder / JOURNAL)
    (folder / VERSION).unlink(missing_ok=True)
    changed = [name for name, change in journal.changes.items() if change.changed]
    for name in changed:
        region = tensor_regions[name]
        patch = Patch(journal, name, region)
        if not checked:
            checksum = Checksum(journal.versions.checksum)
            for _, data_B, _ in patch.chunks():
                checksum.update(data_B)
            if checksum.hexdigest() != journal.changes[name].after:
                raise CheckpointError(
                    f"{region.file}: {name} was changed while a delta was applied; push whole weights"
                )
        with region.file.open("rb+", buffering=0) as stream:
            for start, data_B, _ in patch.chunks(all_of_them=False):
                region.write(stream, data_B.data, start)
    _finish(folder, journal, {tensor_regions[name].file for name in changed})


def _finish(folder: Path, journal: DeltaFile, files: Iterable[Path]) -> None:
    """Bring the written files to the disk, and name the version."""
    for file in files:
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())
    write_text(folder / VERSION, journal.versions.end + "\n")
    (folder / JOURNAL).unlink()
    sync_folder(folder)
