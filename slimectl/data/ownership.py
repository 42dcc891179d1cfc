"""What this program wrote, and may remove: by the manifest of a folder, or by the names that it gives in a run folder.

Everything else is the user's. It is never removed, cut or overwritten, and nothing is removed through a link.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from slimectl.errors import SettingsError

MANIFEST = "manifest.json"
LOCK = ".slimectl.lock"
"""Held by the run that goes on in a folder."""
STAGED = ".slimectl-staged"
"""Marks a folder that is not whole yet, or that is one push of weights: it may be emptied."""

GROWING = ("metrics.jsonl", "perf.jsonl", "tracked.jsonl")
"""Files that a run appends to, and that a resume cuts back."""

WEIGHTS = r"(model|optimizer|value_head)[^/]*\.safetensors(\.index\.json)?|adapter/adapter_(model|config)\.[a-z]+"
COMPANIONS = (
    r"(config|generation_config|special_tokens_map|added_tokens|trainer)\.json|chat_template\.jinja|tokenizer[^/]*"
    r"|vocab\.[a-z]+|merges\.txt"
)
MODEL = rf"({WEIGHTS}|{COMPANIONS}|manifest\.json|\.slimectl-staged|\.(part|facts)-[^/]+)"
STEP = rf"((policy|critic)/{MODEL}|manifest\.json|state\.json|samples\.jsonl)"

PUSHES = re.compile(r"weights_\d+|current|check")
"""Weights on their way to engines, in the run's folder `weights`."""
CHECKPOINT_FILES = re.compile(f"{STEP}|{MODEL}")
"""The files of a step, of a model and of a warm-up, by their paths in it, where no manifest lists them."""

MODELS = ("model", "warmup")
WRITTEN = r"step_\d{6,}|model|warmup|latest|run\.toml|manifest\.json|track\.json"
"""What is written in a run folder under another name first."""

RUN_FILES = re.compile(
    rf"run\.toml|manifest\.json|{'|'.join(map(re.escape, GROWING))}|log\.txt|track\.json|latest"
    rf"|\.tmp-({WRITTEN})(\.\d+|/.+)?|step_\d{{6,}}/\.tmp-(state\.json|samples\.jsonl)|reference/\.tmp-\d+/.+"
    rf"|step_\d{{6,}}/{STEP}|(model|reference/\d+)/{MODEL}|warmup/({MODEL}|{STEP})"
    rf"|eval/[^/]+-\d{{6,}}\.jsonl|eval/\.tmp-[^/]+"
    rf"|logs/[^/]+\.log|weights/({PUSHES.pattern}|\.tmp-[^/]+)/.+|weights/[^/]+\.delta"
    rf"|tensorboard/events\.out\.tfevents\.[^/]+"
    rf"|wandb/((offline-)?run-[^/]+/.+|debug[^/]*\.log|latest-run)|swanlab/(run-[^/]+/.+|\.gitignore)"
)
"""The files of a run folder, by their paths in it; whatever else lies there is the user's."""

TEMPORARY = re.compile(rf"\.tmp-({WRITTEN}|\d+)(\.\d+)?")
HALF_WRITTEN = re.compile(r"([^/]+/)?\.tmp-.+")
"""What of a run's files a resume removes."""

UNSIGNED = re.compile(rf"{re.escape(LOCK)}|\.tmp-{re.escape(MANIFEST)}(\.\d+)?")
"""What a run leaves that was killed before its folder had a manifest."""

STEP_FOLDER = re.compile(r"step_\d{6,}")
RUN_NAMES = re.compile(
    rf"{STEP_FOLDER.pattern}|run\.toml|manifest\.json|{'|'.join(map(re.escape, GROWING))}|log\.txt|track\.json"
    r"|model|warmup|reference|eval|logs|weights|tensorboard|wandb|swanlab"
)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest that this program wrote into a folder; None if there is none that can be read."""
    with suppress(OSError, ValueError):
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if isinstance(manifest, dict) and ("slimectl" in manifest or isinstance(manifest.get("files"), dict)):
            return manifest
    return None


def is_run(folder: Path) -> bool:
    """Return whether a folder is signed as that of a run."""
    return (read_manifest(folder) or {}).get("stage") == "run"


def is_older_run(folder: Path) -> bool:
    """Return whether a folder without manifest is a run's all the same: all that a resume would touch is ours.

    Earlier versions signed a run at its end only.
    """
    listed = [child for child in folder.iterdir() if STEP_FOLDER.fullmatch(child.name) or child.name in MODELS]
    for child in listed:
        if not child.is_dir() or (not is_made(child) and files_below(child) != ["samples.jsonl"]):
            return False
    if not all(_holds_records(folder / name) for name in GROWING):
        return False
    evidence = bool(listed) or any(file_size(folder / name) for name in GROWING)
    return evidence or all(RUN_FILES.fullmatch(name) or name == LOCK for name in files_below(folder))


def _holds_records(file: Path) -> bool:
    """Return whether a growing file is one that a run wrote: it begins with a record, or is empty, or not there."""
    try:
        with file.open("rb") as lines:
            record = json.loads(lines.readline() or "{}")
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return record == {} or (isinstance(record, dict) and {"step", "metrics"} <= record.keys())


def refuse_links(folder: Path, reason: str, *, only: Collection[str] | None = None) -> None:
    """Raises SettingsError if a link has the name of something that a run writes; but `latest` is one."""
    for child in sorted(folder.iterdir()):
        ours = RUN_NAMES.fullmatch(child.name) if only is None else child.name in only
        if ours and child.is_symlink():
            raise SettingsError(f"{child}: is a link, so {reason}; put the thing itself there, or move it away")
    latest = folder / "latest"
    if os.path.lexists(latest) and not latest.is_symlink():
        raise SettingsError(f"{latest}: is not the link that slimectl makes, so {reason}; move it away")


def file_size(file: Path) -> int:
    """Return the bytes of a file; 0 if it is not there."""
    with suppress(OSError):
        return file.stat().st_size
    return 0


def is_made(folder: Path) -> bool:
    """Return whether a folder was made by this program: it has its manifest or its mark, or nothing at all."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    listed = (read_manifest(folder) or {}).get("files")
    return isinstance(listed, dict) or _is_regular(folder / STAGED) or not any(folder.iterdir())


def files_below(folder: Path) -> list[str]:
    """Return the paths of everything but folders below `folder`, links among it; none of them is followed."""
    names: list[str] = []
    for parent, folders, files in os.walk(folder):
        here = os.path.relpath(parent, folder)
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        names += [os.path.normpath(os.path.join(here, name)) for name in [*files, *links]]
    return sorted(names)


def own_files(folder: Path, names: re.Pattern[str] | None = None) -> list[str]:
    """Return the files in a folder that are this program's: those that its manifest lists, or that match `names`."""
    listed = (read_manifest(folder) or {}).get("files") or {}
    staged = _is_regular(folder / STAGED)
    return [
        name
        for name in files_below(folder)
        if staged or name in listed or name == MANIFEST or (names is not None and names.fullmatch(name))
    ]


def own_run_files(folder: Path) -> list[str]:
    """Return the files of a run folder that are the run's; within a checkpoint those that its manifest lists."""
    mine = [name for name in files_below(folder) if RUN_FILES.fullmatch(name)]
    listings: dict[str, dict[str, Any]] = {}
    for name in mine:
        top = _checkpoint_of(name)
        if top and top not in listings:
            listings[top] = (read_manifest(folder / top) or {}).get("files") or {}
    return [name for name in mine if _is_listed(name, listings)]


def _checkpoint_of(name: str) -> str:
    """Return the checkpoint that a file of a run lies in; empty if in none."""
    match = re.match(r"(step_\d{6,}|model|warmup|reference/\d+)/", name)
    return match.group(1) if match else ""


def _is_listed(name: str, listings: dict[str, dict[str, Any]]) -> bool:
    top = _checkpoint_of(name)
    listed = listings.get(top)
    rest = name.removeprefix(f"{top}/")
    return not top or not listed or rest in listed or rest in (MANIFEST, "samples.jsonl")


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove these files of a folder, the manifest last, and the folders that are empty then (not `folder` itself).

    What is gone already is no error: a crash may have been here before, or a dying process be at it still.
    """
    parents: set[Path] = set()
    for name in sorted(names, key=lambda name: (Path(name).name == MANIFEST, name == MANIFEST)):
        path = folder / name
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
        parents |= {parent for parent in path.parents if folder in parent.parents}
    for parent in sorted(parents, key=lambda path: -len(path.parts)):
        with suppress(OSError):
            parent.rmdir()


def remove_made(folder: Path, names: re.Pattern[str] | None = None) -> bool:
    """Remove what this program made of a folder, and the folder unless something else lies there; whether it is gone.

    A link, and a folder without manifest or mark (where no `names` are its), is left alone.
    """
    if folder.is_symlink() or not folder.is_dir():
        return not os.path.lexists(folder)
    if names is None and not is_made(folder):
        return False
    remove_files(folder, own_files(folder, names))
    _remove_empty(folder)
    return not folder.exists()


def remove_staged(path: Path) -> None:
    """Remove a half-written file or folder of a run, under a name that only staging has; links are not followed."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if path.is_dir() and not path.is_symlink():
            remove_files(path, files_below(path))
            _remove_empty(path)
        else:
            path.unlink()


def _remove_empty(folder: Path) -> None:
    """Remove a folder and those below it, as far as they are empty."""
    for parent, folders, _ in os.walk(folder, topdown=False):
        for name in folders:
            with suppress(OSError):
                os.rmdir(os.path.join(parent, name))
    with suppress(OSError):
        folder.rmdir()


def _is_regular(path: Path) -> bool:
    with suppress(OSError):
        return stat.S_ISREG(path.lstat().st_mode)
    return False
