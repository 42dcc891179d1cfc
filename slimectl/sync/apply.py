"""A delta applied in place to a checkpoint, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from slimectl.data.replacing import sync_folder
from slimectl.data.rundir import explained_storage, write_text
from slimectl.errors import CheckpointError
from slimectl.sync.delta_file import DeltaFile, DeltaWriter, Versions, digest
from slimectl.sync.regions import Region, regions

JOURNAL = ".slimectl-delta"
"""A delta that has been begun: what is left of it is done before anything else."""
VERSION = "weight_version.txt"


def apply_delta(delta: Path, folder: Path) -> None:
    """Bring the Hugging Face directory `folder` from the delta's first version to its last.

    Nothing is touched before every tensor has been found to have the checksum that the delta begins from, and to get
    the one that it ends with. What is to be written is then put down beside the files: after a crash at any moment the
    next call goes on from there. A directory that has the last version already is left alone.

    Raises CheckpointError where the directory does not fit the delta; it is as before.
    """
    folder = Path(folder)
    with explained_storage(folder):
        recover(folder)
        found, change = regions(folder), DeltaFile(delta)
        versions = change.versions
        has = weight_version(folder)
        if has not in (None, versions.start, versions.end):
            raise CheckpointError(
                f"{folder}: holds weights {has}, the delta goes from {versions.start}; push whole ones"
            )
        if has == versions.end and _matches(change, found):
            return
        staged = folder / f".tmp-{JOURNAL}"
        try:
            _prepare(change, found, staged)
            with staged.open("rb+") as file:
                os.fsync(file.fileno())
            staged.rename(folder / JOURNAL)
        finally:
            staged.unlink(missing_ok=True)
        sync_folder(folder)
        _roll_forward(folder, found, checked=True)


def recover(folder: Path) -> None:
    """Finish what a crash has interrupted. Raises CheckpointError if the files have been changed since."""
    if (folder / JOURNAL).exists():
        found = regions(folder)
        _roll_forward(folder, found, checked=False)


def weight_version(folder: Path) -> str | None:
    """Which weights a directory says it has."""
    file = folder / VERSION
    return file.read_text().strip() if file.exists() else None


def _prepare(delta: DeltaFile, found: dict[str, Region], journal: Path) -> None:
    """Check everything, and write the changes as new bits: those can be put in place twice, an xor cannot."""
    _check_forms(delta, found)
    versions = delta.versions
    writer = DeltaWriter(journal, Versions(versions.start, versions.end, "overwrite", versions.checksum))
    try:
        for name, change in delta.changes.items():
            region = found[name]
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


def _check_forms(delta: DeltaFile, found: dict[str, Region]) -> None:
    for name in found.keys() ^ delta.changes.keys():
        raise CheckpointError(f"{delta.path}: {name} is in it or in the checkpoint only; push whole weights")
    for name, change in delta.changes.items():
        region = found[name]
        if (region.code, list(region.shape)) != (change.code, change.shape):
            raise CheckpointError(
                f"{region.file}: {name} is {region.code} {list(region.shape)}, the delta is for {change.code}"
                f" {change.shape}; push whole weights"
            )


def _matches(delta: DeltaFile, found: dict[str, Region]) -> bool:
    """Whether the directory is what the delta leads to."""
    checksum = delta.versions.checksum
    return all(digest(checksum, found[name].read()) == change.after for name, change in delta.changes.items())


def _roll_forward(folder: Path, found: dict[str, Region], *, checked: bool) -> None:
    """Put what the journal says in place; `checked`: it was written a moment ago, from these very files."""
    journal = DeltaFile(folder / JOURNAL)
    (folder / VERSION).unlink(missing_ok=True)
    changed = [name for name, change in journal.changes.items() if change.bitmap is not None]
    for name in changed:
        region = found[name]
        new = journal.applied(name, region.read(), region.width)
        if not checked and digest(journal.versions.checksum, new) != journal.changes[name].after:
            raise CheckpointError(f"{region.file}: {name} was changed while a delta was applied; push whole weights")
        region.write(new)
    for file in {found[name].file for name in changed}:
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())
    write_text(folder / VERSION, journal.versions.end + "\n")
    (folder / JOURNAL).unlink()
    sync_folder(folder)
