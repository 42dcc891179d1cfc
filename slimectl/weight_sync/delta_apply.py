"""Applies a delta in place to a checkpoint, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from slimectl.data.atomic_replace import sync_folder
from slimectl.data.run_dir import storage_errors, write_text
from slimectl.errors import CheckpointError
from slimectl.weight_sync.delta_format import DeltaFile, DeltaWriter, TensorRange, Versions, digest, tensor_ranges

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
        staged = folder / f".tmp-{JOURNAL}"
        try:
            _prepare(change, tensor_regions, staged)
            with staged.open("rb+") as file:
                os.fsync(file.fileno())
            staged.rename(folder / JOURNAL)
        finally:
            staged.unlink(missing_ok=True)
        sync_folder(folder)
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


def _prepare(delta: DeltaFile, tensor_regions: dict[str, TensorRange], journal: Path) -> None:
    """Verify every tensor, and write the changes as new bits: those can be applied twice, an xor cannot."""
    _check_forms(delta, tensor_regions)
    versions = delta.versions
    writer = DeltaWriter(journal, Versions(versions.start, versions.end, "overwrite", versions.checksum))
    try:
        for name, change in delta.changes.items():
            region = tensor_regions[name]
            old = region.read()
            if digest(versions.checksum, old) != change.before:
                raise CheckpointError(
                    f"{region.file}: {name} is not as the delta from {versions.start} expects it; push whole weights"
                )
            new = delta.applied(name, old, region.width)
            if digest(versions.checksum, new) != change.after:
                raise CheckpointError(f"{delta.path}: {name} does not become what it should; push whole weights")
            writer.add(name, change, width=region.width, old=old, new=new)
        writer.finish()
    finally:
        writer.close()


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
    checksum = delta.versions.checksum
    return all(digest(checksum, tensor_regions[name].read()) == change.after for name, change in delta.changes.items())


def _roll_forward(folder: Path, tensor_regions: dict[str, TensorRange], *, checked: bool) -> None:
    """Write the journal's values into the files; `checked`: it was written a moment ago, from these same files."""
    journal = DeltaFile(folder / JOURNAL)
    (folder / VERSION).unlink(missing_ok=True)
    changed = [name for name, change in journal.changes.items() if change.bitmap is not None]
    for name in changed:
        region = tensor_regions[name]
        new = journal.applied(name, region.read(), region.width)
        if not checked and digest(journal.versions.checksum, new) != journal.changes[name].after:
            raise CheckpointError(f"{region.file}: {name} was changed while a delta was applied; push whole weights")
        region.write(new)
    for file in {tensor_regions[name].file for name in changed}:
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())
    write_text(folder / VERSION, journal.versions.end + "\n")
    (folder / JOURNAL).unlink()
    sync_folder(folder)
