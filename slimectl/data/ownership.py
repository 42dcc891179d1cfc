"""Ownership of files. slimectl removes only files that it wrote, identified by a manifest or by names in a run folder.

Everything else belongs to the user, and is never removed, truncated or overwritten. Nothing is removed through a link.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from slimectl.errors import SettingsError
from slimectl.plugins.registry import TRACKERS
from slimectl.system.model_files import LINKS, linked_step

MANIFEST = "manifest.json"
LOCK = ".slimectl.lock"
"""Lock file of the active run in a folder."""
CARD = "README.md"
"""Card of a model in its folder. People edit cards: an edited one is theirs, and no check of integrity reads it."""
STAGED = ".slimectl-staged"
"""Marks an incomplete folder, or a folder of one weight push, whose content may be removed."""

GROWING = ("metrics.jsonl", "perf.jsonl", "timeline.jsonl", "tracked.jsonl")
"""Files that a run appends to, and that a resume truncates."""

EVENTS = re.compile(r"tensorboard/events\.out\.tfevents\.[^/]+")
"""TensorBoard files, a new one for each start of a run. A resume truncates them too, and removes later ones."""

ROUND_FILES = ("samples.jsonl", "train_data.jsonl")
"""Records of a round in its folder, which are kept when its checkpoint is removed."""

WEIGHTS = (
    r"(model|optimizer|value_head)[^/]*\.safetensors(\.index\.json)?|adapter/adapter_(model|config)\.[a-z]+"
    r"|__\d+_\d+\.distcp|\.metadata|metadata\.json|common\.pt"
)
COMPANIONS = (
    r"(config|generation_config|((video_)?pre)?processor_config|special_tokens_map|added_tokens|tekken|trainer|chat_template)\.json|[^/]+\.(jinja|model|tiktoken)|tokenizer[^/]*"
    r"|vocab\.[a-z]+|merges\.txt|additional_chat_templates/[^/]+\.jinja"
)
CARDS = r"(adapter/)?README\.md"
MODEL = (
    rf"((trainer/)?({WEIGHTS}|{COMPANIONS})|{CARDS}|\.gitignore|manifest\.json|\.slimectl-staged|\.(part|facts)-[^/]+)"
)
STEP = rf"((trainer/)?(policy|critic)/{MODEL}|manifest\.json|state\.json|{'|'.join(map(re.escape, ROUND_FILES))})"

PUSHES = re.compile(r"weights_\d+|current|check")
"""Folders of weights in transit to engines, in the run's folder `weights`."""
CHECKPOINT_FILES = re.compile(f"{STEP}|{MODEL}")
"""Relative paths of the files of a step, a model or a warm-up, for folders whose manifest does not list them."""

MODELS = ("model", "warmup")
WRITTEN = r"step_\d{6,}|model|warmup|latest|best|run\.toml|manifest\.json|(track|memory|engines)\.json"
"""Entries of a run folder that are written under a temporary name first."""

TRACKER_FILES = [part.facts["files"] for part in TRACKERS.parts.values() if "files" in part.facts]
"""Files that slimectl's trackers write into a run folder. Files of trackers from other packages are the user's."""

RUN_FILES = re.compile(
    rf"run\.toml|manifest\.json|{'|'.join(map(re.escape, GROWING))}|log\.txt|(track|memory|engines)\.json|latest|best"
    rf"|engines/(\.tmp-)?[\d-]+[0-9a-f]*\.json(\.\d+)?|\.tmp-({WRITTEN})(\.\d+|/.+)?|step_\d{{6,}}/\.tmp-(state\.json|(samples|train_data)\.jsonl)|reference/\.tmp-\d+/.+"
    rf"|step_\d{{6,}}/\.samples\.jsonl\.index\.npz(\.\d+)?|eval/\.[^/]+\.index\.npz(\.\d+)?"
    rf"|step_\d{{6,}}/{STEP}|(model|reference/\d+)/{MODEL}|warmup/({MODEL}|{STEP})"
    rf"|eval/[^/]+-\d{{6,}}\.jsonl|eval/\.tmp-[^/]+"
    rf"|logs/[^/]+\.(log|tokenizer/.+)|profile/rounds_[^/]+\.(json\.gz|memory\.pickle)|weights/({PUSHES.pattern}|\.tmp-[^/]+)/.+|weights/[^/]+\.delta"
    rf"|{'|'.join(TRACKER_FILES)}"
)
"""Relative paths of the files of a run folder. All other files are the user's."""

TEMPORARY = re.compile(rf"\.tmp-({WRITTEN}|\d+)(\.\d+)?")
HALF_WRITTEN = re.compile(r"([^/]+/)?\.tmp-.+|engines/.+")
"""Files of a run that a resume removes: incomplete ones, and requests to add or remove engines."""

UNSIGNED = re.compile(rf"{re.escape(LOCK)}|\.tmp-{re.escape(MANIFEST)}(\.\d+)?")
"""Files left by a run that was killed before its folder had a manifest."""

STEP_FOLDER = re.compile(r"step_\d{6,}")
RUN_NAMES = re.compile(
    rf"{STEP_FOLDER.pattern}|run\.toml|manifest\.json|{'|'.join(map(re.escape, GROWING))}|log\.txt"
    r"|(track|memory|engines)\.json|engines|model|warmup|reference|eval|logs|profile|weights"
    rf"|{'|'.join(files.partition('/')[0] for files in TRACKER_FILES)}"
)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest that slimectl wrote into a folder, or None if it is missing or unreadable."""
    with suppress(OSError, ValueError):
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if isinstance(manifest, dict) and ("slimectl" in manifest or isinstance(manifest.get("files"), dict)):
            return manifest
    return None


def is_run(folder: Path) -> bool:
    """Return whether the manifest of a folder marks it as a run."""
    return (read_manifest(folder) or {}).get("stage") == "run"


def is_older_run(folder: Path) -> bool:
    """Return whether a folder without a manifest is a run of an older version.

    It is one if slimectl wrote all files that a resume would touch. Earlier versions wrote the manifest only at the end
    of a run.
    """
    listed = [child for child in folder.iterdir() if STEP_FOLDER.fullmatch(child.name) or child.name in MODELS]
    for child in listed:
        if not child.is_dir() or (not is_made(child) and not set(files_below(child)) <= set(ROUND_FILES)):
            return False
    if not all(_holds_records(folder / name) for name in GROWING):
        return False
    evidence = bool(listed) or any(file_size(folder / name) for name in GROWING)
    return evidence or all(RUN_FILES.fullmatch(name) or name == LOCK for name in files_below(folder))


def _holds_records(file: Path) -> bool:
    """Return whether a growing file may come from a run: it starts with a record, is empty, or does not exist."""
    try:
        with file.open("rb") as lines:
            record = json.loads(lines.readline() or "{}")
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return record == {} or (isinstance(record, dict) and {"step", "metrics"} <= record.keys())


def refuse_links(folder: Path, reason: str, *, only: Collection[str] | None = None) -> None:
    """Raise SettingsError if an entry that a run writes is a link. Only its links to checkpoints are allowed."""
    for child in sorted(folder.iterdir()):
        ours = RUN_NAMES.fullmatch(child.name) if only is None else child.name in only
        if ours and child.is_symlink():
            raise SettingsError(f"{child}: is a link, so {reason}. Replace it with its target, or move it away.")
    for name in LINKS:
        link = folder / name
        if os.path.lexists(link) and not link.is_symlink() and linked_step(folder, name) is None:
            raise SettingsError(f"{link}: was not written by slimectl, so {reason}. Move it away.")


def file_size(file: Path) -> int:
    """Return the size of a file in bytes, or 0 if it does not exist."""
    with suppress(OSError):
        return file.stat().st_size
    return 0


def is_made(folder: Path) -> bool:
    """Return whether slimectl made a folder. It then has a slimectl manifest or the staging mark, or is empty."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    listed = (read_manifest(folder) or {}).get("files")
    return isinstance(listed, dict) or _is_regular(folder / STAGED) or not any(folder.iterdir())


def files_below(folder: Path) -> list[str]:
    """Return the relative paths of all files and links below `folder`. Links are not followed."""
    names: list[str] = []
    for parent, folders, files in os.walk(folder):
        relative = os.path.relpath(parent, folder)
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        names += [os.path.normpath(os.path.join(relative, name)) for name in [*files, *links]]
    return sorted(names)


def own_files(folder: Path, names: re.Pattern[str] | None = None) -> list[str]:
    """Return the files in a folder that slimectl owns: listed in its manifest, or matching `names`."""
    listed = (read_manifest(folder) or {}).get("files") or {}
    staged = _is_regular(folder / STAGED)
    return [
        name
        for name in files_below(folder)
        if staged
        or (
            _is_own_card(folder, name, listed)
            if is_card(name)
            else name in listed or name == MANIFEST or (names is not None and names.fullmatch(name))
        )
    ]


def is_card(name: str) -> bool:
    """Return whether a file of a folder is a model's card."""
    return name.rpartition("/")[2] == CARD


def _is_own_card(folder: Path, name: str, listed: dict[str, Any]) -> bool:
    """Return whether slimectl wrote a card, and it was not edited since."""
    digest = entry.get("sha256") if isinstance(entry := listed.get(name), dict) else None
    with suppress(OSError):
        return digest is not None and hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    return False


def own_run_files(folder: Path) -> list[str]:
    """Return the files of a run folder that the run owns. In a checkpoint, these are the files in its manifest."""
    mine = [name for name in files_below(folder) if RUN_FILES.fullmatch(name)]
    listings: dict[str, dict[str, Any]] = {}
    for name in mine:
        top = _checkpoint_of(name)
        if top and top not in listings:
            listings[top] = (read_manifest(folder / top) or {}).get("files") or {}
    return [name for name in mine if _is_listed(folder, name, listings)]


def _checkpoint_of(name: str) -> str:
    """Return the checkpoint folder of a run's file, or "" if it is in none."""
    match = re.match(r"(step_\d{6,}|model|warmup|reference/\d+)/", name)
    return match.group(1) if match else ""


def _is_listed(folder: Path, name: str, listings: dict[str, dict[str, Any]]) -> bool:
    top = _checkpoint_of(name)
    listed = listings.get(top)
    relative = name.removeprefix(f"{top}/")
    if is_card(name):
        return _is_own_card(folder / top, relative, listed or {})
    return not top or not listed or relative in listed or relative in (MANIFEST, *ROUND_FILES)


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove these files of a folder, the manifest last, and then its empty subfolders. Keep `folder` itself.

    Missing files are ignored: an earlier attempt, or another process, may have removed them.
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
    """Remove slimectl's files in a folder, and the folder if it is then empty. Return whether it is gone.

    A link is left unchanged, and so is a folder without a manifest or mark, unless `names` is given.
    """
    if folder.is_symlink() or not folder.is_dir():
        return not os.path.lexists(folder)
    if names is None and not is_made(folder):
        return False
    remove_files(folder, own_files(folder, names))
    _remove_empty(folder)
    return not folder.exists()


def remove_staged(path: Path) -> None:
    """Remove an incomplete staging file or folder of a run. Links are not followed."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if path.is_dir() and not path.is_symlink():
            remove_files(path, files_below(path))
            _remove_empty(path)
        else:
            path.unlink()


def _remove_empty(folder: Path) -> None:
    """Remove the empty folders below a folder, and the folder itself if empty."""
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
