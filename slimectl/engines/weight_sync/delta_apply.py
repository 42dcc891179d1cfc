"""Applies the delta that a push has written to its checkpoint, either completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slimectl.data.atomic_replace import storage_errors, sync_folder, write_text
from slimectl.engines.weight_sync.delta_format import DeltaFile, tensor_ranges
from slimectl.errors import CheckpointError
from slimectl.system.deltas import change_numbers

JOURNAL = ".slimectl-delta"
"""Journal of an unfinished delta, which is completed before anything else."""
VERSION = "weight_version.txt"


def recover(folder: Path) -> None:
    """Finish a delta that a crash interrupted. Raises CheckpointError if the files have been changed since."""
    if (folder / JOURNAL).exists():
        _apply_journal(folder, verifies=True)


def weight_version(folder: Path) -> str | None:
    """Read the weight version that a directory records, or None without one."""
    file = folder / VERSION
    return file.read_text().strip() if file.exists() else None


def apply_written(folder: Path) -> None:
    """Bring the directory to the version of the delta that write_delta has just written from it, with a journal.

    The journal was made from these same files, so their checksums are not computed again. Raises CheckpointError
    without it.
    """
    with storage_errors(folder):
        staged = staged_journal(folder)
        if not staged.exists():
            raise CheckpointError(f"{folder}: no delta was written for it. Push whole weights.")
        with staged.open("rb+") as file:
            os.fsync(file.fileno())
        staged.rename(folder / JOURNAL)  # from here on the delta will be applied, whatever happens
        sync_folder(folder)
        _apply_journal(folder, verifies=False)


def staged_journal(folder: Path) -> Path:
    """Return the path of a journal that nothing depends on yet."""
    return folder / f".tmp-{JOURNAL}"


def _apply_journal(folder: Path, *, verifies: bool) -> None:
    """Write the journal's new bits to the files, sync them to disk, and record the version.

    New bits can be written twice, so a second call finishes an interrupted first one.
    """
    journal, tensor_regions = DeltaFile(folder / JOURNAL), tensor_ranges(folder)
    (folder / VERSION).unlink(missing_ok=True)
    changed = {name: tensor_regions[name] for name, change in journal.changes.items() if change.changed}
    mapped_files: dict[Path, Any] = {}
    for name, region in changed.items():
        data_B = region.mapped(mapped_files)
        gaps_C, values_C = journal.gaps(name, region.width)
        change_numbers(data_B.view(values_C.dtype), gaps_C, values_C, is_xor=False)
        if verifies and not journal.matches(name, data_B):
            raise CheckpointError(f"{region.file}: {name} was changed while a delta was applied. Push whole weights.")
    for file in {region.file for region in changed.values()}:
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())
    write_text(folder / VERSION, journal.versions.end + "\n")
    (folder / JOURNAL).unlink()
    sync_folder(folder)
