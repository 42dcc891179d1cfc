"""A folder made whole beside its name and put in the place of an older one, which is ours by its manifest only.

`.tmp-NAME` is the new folder while it grows, marked as ours; `.old-NAME` the one before, for as long as a rename takes.
What the user has put into the old folder moves into the new one.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import count
from pathlib import Path

from slimectl.data.locks import Lock
from slimectl.data.ownership import STAGED, files_below, is_made, own_files, remove_made, remove_staged
from slimectl.errors import SettingsError

RESUME = ".resume"
"""Names the work that a staging folder belongs to."""


def new_file(path: Path) -> Path:
    """Create an empty file beside `path` to be renamed to it later, under a name that nobody has: `.tmp-NAME`."""
    for number in count():
        staged = path.with_name(f".tmp-{path.name}" + (f".{number}" if number else ""))
        with suppress(FileExistsError):
            os.close(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            return staged
    raise AssertionError("some number is free")


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def writing(target: Path) -> Lock:
    """Return the lock of whoever writes the folder `target`; its parents are made. Acquired by `with`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.lock")
    return Lock(lock, f"{target}: is being written", way_out="wait for its end, or name another")


def refuse_existing(target: Path, *, force: bool) -> None:
    """Raises SettingsError if `target` holds something that was not offered, or is not ours, to be replaced."""
    if target.is_symlink():
        raise SettingsError(f"{target}: is a link; give the folder itself, or name another")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        raise SettingsError(f"{target}: exists already; add --force to replace it, or name another")
    if not is_made(target):
        raise SettingsError(
            f"{target}: slimectl did not make it (no manifest.json of its own), and does not replace it; name another, "
            "or move it away"
        )


def staging(target: Path, resume: str | None) -> Path:
    """Return the folder `.tmp-NAME`, empty unless it is what an interruption of the same work has left.

    Raises SettingsError if somebody else's is in the way.
    """
    staged = target.with_name(f".tmp-{target.name}")
    note = staged / RESUME
    if os.path.lexists(staged) and not is_made(staged):
        raise SettingsError(f"{staged}: is in the way, and slimectl did not make it; move it away")
    if resume is None or not note.exists() or note.read_text() != resume:
        remove_staged(staged)
        staged.mkdir(parents=True)
        (staged / STAGED).touch()
    return staged


def recover(target: Path, names: re.Pattern[str] | None = None) -> None:
    """Finish a replacement that was cut off between its renames; `names` are ours besides those of a manifest."""
    old = _old(target)
    if not old.is_dir() or old.is_symlink() or not (names or is_made(old)):
        return
    if os.path.lexists(target):
        _settle(old, target, names)
    else:
        os.rename(old, target)


def replace_folder(staged: Path, target: Path, names: re.Pattern[str] | None = None) -> None:
    """Give the whole folder `staged` the name `target`. Raises SettingsError if that would lose what is not ours."""
    old = _old(target)
    if replaces := os.path.lexists(target):
        clash = [name for name in _foreign_files(target, names) if os.path.lexists(staged / name)]
        if clash or os.path.lexists(old):
            place = target / clash[0] if clash else old
            raise SettingsError(f"{place}: is in the way, and slimectl did not write it; move it away")
        os.rename(target, old)
    os.rename(staged, target)
    sync_folder(target.parent)
    if replaces:
        _settle(old, target, names)


def _settle(old: Path, target: Path, names: re.Pattern[str] | None) -> None:
    """Move what is not ours from the old folder into the new one, and remove the rest."""
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
