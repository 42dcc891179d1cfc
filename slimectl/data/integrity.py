"""Files against the manifest that was written with them: sizes, and SHA-256."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from slimectl.data.ownership import MANIFEST
from slimectl.errors import CheckpointError
from slimectl.model_files import check_file, open_file, read_json

HASHED_BYTES = 1024**3
"""Folders up to this size are hashed whenever they are opened: at 1.5 GB/s less than reading the weights takes."""
SMALL_BYTES = 32 * 1024**2
"""Files up to this size (config, tokenizer) are hashed in larger folders too."""

Files = dict[str, tuple[int, str]]
"""Bytes and SHA-256 by name."""


def sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def integrity_error(folder: Path) -> str | None:
    """Say what is wrong with a folder that `write_folder` made, every byte compared; None if it is whole."""
    try:
        files = _files(read_json(folder / MANIFEST))
    except (OSError, CheckpointError) as error:
        return f"no readable {MANIFEST} ({error})"
    if files is None:
        return f"no readable {MANIFEST} (it lists no files)"
    try:
        errors = (_file_error(folder, name, entry, whole=True) for name, entry in files.items())
        return next((error for error in errors if error), None)
    except CheckpointError as error:
        return str(error)


def check_integrity(folder: Path, *, whole: bool = False) -> bool:
    """Compare a model folder with its manifest; return whether it has one.

    A step of a run stands for its policy: the manifest lies above it. Sizes are compared always, hashes of files up to
    SMALL_BYTES, and of all where they are up to HASHED_BYTES together or `whole` asks. Raises CheckpointError.
    """
    for root, prefix in ((folder, ""), (folder.parent, f"{folder.name}/")):
        manifest = root / MANIFEST
        if not manifest.is_file() or (prefix and folder.name != "policy"):
            continue
        files = {name: entry for name, entry in (_files(read_json(manifest)) or {}).items() if name.startswith(prefix)}
        if files:
            whole = whole or sum(size for size, _ in files.values()) <= HASHED_BYTES
            error = _first_error(root, tuple(files.items()), whole, _stamps(root, files))
            if error:
                raise CheckpointError(f"{root}: {error} in {manifest}; {_remedy(folder, manifest, prefix)}")
            return True
    return False


def _remedy(folder: Path, manifest: Path, prefix: str) -> str:
    changed = f"copy {folder} elsewhere and use that" if prefix else f"remove {manifest}"
    return f"copy or convert it again, or, if you changed it yourself, {changed}"


def _files(manifest: dict[str, Any]) -> Files | None:
    """The files of a manifest of ours; None for one that lists none, or that another program wrote.

    Raises CheckpointError for a name that leads out of the folder.
    """
    listed = manifest.get("files")
    if not isinstance(listed, dict):
        return None
    files: Files = {}
    for name, entry in listed.items():
        size, digest = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if not isinstance(size, int) or not isinstance(digest, str):
            return None
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise CheckpointError(f"{MANIFEST} names {name!r:.80}, which is no file of its folder")
        files[name] = size, digest
    return files


def _stamps(root: Path, files: Files) -> tuple[Any, ...]:
    """What changes when a file does: a folder is opened several times by one command, and hashed once."""
    stamps = []
    for name in files:
        try:
            entry = os.stat(root / name)
            stamps.append((entry.st_mtime_ns, entry.st_ctime_ns, entry.st_size, entry.st_ino))
        except OSError:
            stamps.append((0, 0, -1, 0))
    return tuple(stamps)


@lru_cache(maxsize=64)
def _first_error(root: Path, files: tuple[tuple[str, tuple[int, str]], ...], whole: bool, _: Any) -> str | None:
    """What is wrong with the first file that does not match."""
    errors = (_file_error(root, name, entry, whole=whole) for name, entry in files)
    return next((error for error in errors if error), None)


def _file_error(root: Path, name: str, entry: tuple[int, str], *, whole: bool) -> str | None:
    size, digest = entry
    try:
        found = check_file(root / name).st_size
    except FileNotFoundError:
        return f"{name} is missing"
    if found != size:
        return f"{name} has {found} bytes, not {size}"
    if (whole or size <= SMALL_BYTES) and sha256(root / name) != digest:
        return f"{name} does not match its SHA-256"
    return None
