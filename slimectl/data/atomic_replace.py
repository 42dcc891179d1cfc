"""Atomic replacement of files and folders: written next to the target, then renamed over it.

`.tmp-NAME` is the new folder while it is written, with a mark that it is slimectl's. `.old-NAME` is the previous one
during the renames. Only folders with a slimectl manifest are replaced. The user's files in the old folder move into the
new one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from slimectl.data.locks import Lock
from slimectl.data.ownership import STAGED, files_below, is_card, is_made, own_files, remove_made, remove_staged
from slimectl.errors import SettingsError, StorageError

RESUME = ".resume"
"""File that identifies the work of a staging folder."""


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a StorageError that names the path and the remedy."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error
    except Exception as error:
        # safetensors writes in Rust and wraps the system's error in its own type, which is not an OSError.
        if type(error).__name__ == "SafetensorError" and "os error" in str(error):
            raise storage_error(path, OSError(0, str(error).rpartition(": ")[2])) from error
        raise


def storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: {error.strerror or error}. Nothing was left under that name. Free space or write elsewhere."
    )


def new_file(path: Path) -> Path:
    """Create an empty file next to `path` under an unused name, `.tmp-NAME`, to be renamed to `path` later."""
    for number in count():
        staged = path.with_name(f".tmp-{path.name}" + (f".{number}" if number else ""))
        with suppress(FileExistsError):
            os.close(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            return staged
    raise AssertionError("some number is free")


def write_text(path: Path, text: str) -> None:
    """Replace a small file atomically: readers see the old or the new text, never a part of it."""
    staged: Path | None = None
    try:
        staged = new_file(path)
        with staged.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except OSError as error:
        if staged is not None:
            staged.unlink(missing_ok=True)
        raise storage_error(path, error) from error


def sync_folder(path: Path) -> None:
    """Sync a folder, so that its directory entries are durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def writing(target: Path) -> Lock:
    """Create the parents of the folder `target` and return its write lock, to be acquired by `with`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.lock")
    return Lock(lock, f"{target}: is being written", way_out="Wait until it is done, or use another name.")


def refuse_existing(target: Path, *, force: bool) -> None:
    """Raise SettingsError if `target` holds files and may not be replaced: no `force`, or not made by slimectl."""
    if target.is_symlink():
        raise SettingsError(f"{target}: is a link. Give the folder itself, or use another name.")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        raise SettingsError(f"{target}: already exists. Add --force to replace it, or use another name.")
    if not is_made(target):
        raise SettingsError(
            f"{target}: slimectl did not create it (it has no slimectl manifest.json) and does not replace it. Use "
            "another name, or move it away."
        )


def staging(target: Path, resume: str | None) -> Path:
    """Return the folder `.tmp-NAME`, empty unless an interrupted attempt at the same work (`resume`) left it.

    Raises SettingsError if a folder of that name exists that slimectl did not create.
    """
    staged = target.with_name(f".tmp-{target.name}")
    note = staged / RESUME
    if os.path.lexists(staged) and not is_made(staged):
        raise SettingsError(f"{staged}: is in the way, and slimectl did not create it. Move it away.")
    if resume is None or not note.exists() or note.read_text() != resume:
        remove_staged(staged)
        staged.mkdir(parents=True)
        (staged / STAGED).touch()
    return staged


def recover(target: Path, names: re.Pattern[str] | None = None) -> None:
    """Finish a replacement that was interrupted between its renames.

    `names` matches slimectl's files that the manifest does not list.
    """
    old = _old(target)
    if not old.is_dir() or old.is_symlink() or not (names or is_made(old)):
        return
    if os.path.lexists(target):
        _settle(old, target, names)
    else:
        os.rename(old, target)


def replace_folder(staged: Path, target: Path, names: re.Pattern[str] | None = None) -> None:
    """Rename the complete folder `staged` to `target`. Raises SettingsError if that would lose the user's files."""
    old = _old(target)
    if replaces := os.path.lexists(target):
        foreign = _foreign_files(target, names)
        for card in filter(is_card, foreign):  # the user's card stays
            (staged / card).unlink(missing_ok=True)
        clash = [name for name in foreign if os.path.lexists(staged / name)]
        if clash or os.path.lexists(old):
            place = target / clash[0] if clash else old
            raise SettingsError(f"{place}: is in the way, and slimectl did not write it. Move it away.")
        os.rename(target, old)
    os.rename(staged, target)
    sync_folder(target.parent)
    if replaces:
        _settle(old, target, names)


def _settle(old: Path, target: Path, names: re.Pattern[str] | None) -> None:
    """Move the user's files from the old folder into the new one, and remove the rest."""
    for name in _foreign_files(old, names):
        if not os.path.lexists(target / name):
            with suppress(OSError):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.rename(old / name, target / name)
    remove_made(old, names)


def _foreign_files(folder: Path, names: re.Pattern[str] | None) -> list[str]:
    ours = set(own_files(folder, names))
    return [name for name in files_below(folder) if name not in ours]


def _old(target: Path) -> Path:
    return target.with_name(f".old-{target.name}")
