"""Manifests: provenance of an output file or folder, and integrity checks of a folder against its sizes and hashes."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from slimectl import __version__
from slimectl.data.atomic_replace import write_text
from slimectl.data.hashing import SHA256, XXH3, Digest, content_hash, damage_hash, new_hash
from slimectl.data.ownership import MANIFEST, is_card
from slimectl.errors import CheckpointError
from slimectl.system.model_files import check_file, open_file, read_json
from slimectl.system.redaction import mask_addresses, redact, without_secrets


def manifest_path(out: Path) -> Path:
    """Return the manifest's path: `OUT.manifest.json` next to a file, `manifest.json` inside a folder."""
    return out / MANIFEST if out.is_dir() else out.with_name(out.name + f".{MANIFEST}")


def is_manifest(path: Path) -> bool:
    """Return whether a file is a manifest that a stage of this program wrote."""
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"slimectl", "stage"} <= manifest.keys()


def sampling_model(samples: Path) -> tuple[str, str] | None:
    """Return the folder and the hash of the model that sampled a file, or None if no manifest records them.

    The manifest of a scored or selected file refers to the manifest of the file that it was made from.
    """
    waiting, seen = [manifest_path(samples)], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen or not is_manifest(path):
            continue
        seen.add(path)
        facts = json.loads(path.read_text())
        if facts["stage"] == "rollout":
            data = _fact(facts, "rollout.data") or []
            models = [item for item in facts["inputs"].items() if item[0] not in data and not item[0].endswith(".py")]
            return models[0] if len(models) == 1 else None
        parents = map(Path, facts.get("parents", ()))
        # The parent's path is as given on the command line. The files may have been moved together since.
        waiting += [parent if parent.exists() else path.parent / parent.name for parent in parents]
    return None


def other_model(samples: Path, model: Path) -> str:
    """Return a warning if the samples come from another model than `model` according to their manifest, else ""."""
    if (sampled_from := sampling_model(samples)) is None:
        return ""
    folder, digest = sampled_from
    if digest == content_hash(model):
        return ""
    return (
        f"{samples}: sampled from {folder}, but {model} has different files or weights. Use samples from the model "
        "that you train."
    )


def settings_hash(settings: dict[str, Any]) -> str:
    """Return a hash of the settings without secrets, because a new API key does not change the work."""
    return hashlib.sha256(json.dumps(without_secrets(settings), sort_keys=True, default=str).encode()).hexdigest()


class Manifest:
    """Provenance of one stage's work, written next to its output."""

    def __init__(self, stage: str, settings: dict[str, Any], inputs: dict[str, str]) -> None:
        self.facts: dict[str, Any] = {
            "slimectl": __version__,
            "stage": stage,
            "settings": redact(settings),
            "settings_sha256": settings_hash(settings),
            "inputs": {mask_addresses(name): digest for name, digest in inputs.items()},
            "host": socket.gethostname(),
            "started": _now(),
        }

    def unchanged(self, out: Path) -> bool:
        """Return whether the same stage made `out` from the same settings and inputs, and not every attempt failed."""
        return self._agrees(out, "stage", "settings_sha256", "inputs") and not _has_failed(out)

    def same_inputs(self, out: Path) -> bool:
        """Return whether this stage made `out` from a model and prompts of the same names, whatever their content."""
        return self._agrees(out, "stage", "rollout.data", "model.path")

    def _agrees(self, out: Path, *keys: str) -> bool:
        try:
            old = json.loads(manifest_path(out).read_text())
        except (OSError, ValueError):
            return False
        return out.exists() and all(_fact(old, key) == _fact(self.facts, key) for key in keys)

    def signed(self, counts: dict[str, int], *, parents: Iterable[str] = ()) -> dict[str, Any]:
        """Return the complete manifest of the finished work, including the existing manifests of inputs (`parents`)."""
        parent_manifests = [str(path) for path in map(manifest_path, map(Path, parents)) if path.exists()]
        return {**self.facts, "finished": _now(), "counts": counts, "parents": parent_manifests}

    def write(self, out: Path, *, counts: dict[str, int], parents: Iterable[str] = ()) -> None:
        """Write the manifest of the finished `out`."""
        manifest = self.signed(counts, parents=parents)
        write_text(manifest_path(out), json.dumps(manifest, indent=2, default=str) + "\n")


def _has_failed(out: Path) -> bool:
    counts = json.loads(manifest_path(out).read_text()).get("counts") or {}
    return "failed" in counts and counts["failed"] == counts.get("out")


def _fact(manifest: dict[str, Any], key: str) -> Any:
    """Return an entry of a manifest, or one of its settings by dotted key."""
    section, _, name = key.rpartition(".")
    return manifest.get("settings", {}).get(section, {}).get(name) if section else manifest.get(key)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


HASHED_BYTES = 1024**3
"""Folders up to this size are hashed whenever they are opened, which is faster than reading the weights."""
SMALL_BYTES = 32 * 1024**2
"""Files up to this size (config, tokenizer) are also hashed in larger folders."""
HASHING_THREADS = 4
"""Files that are hashed in parallel, each on one core. hashlib releases the GIL."""

Files = dict[str, tuple[int, Digest]]
"""Size in bytes and digest by file name."""
ALGORITHMS = (SHA256, XXH3)


def file_digest(path: Path) -> Digest:
    """Return the SHA-256 of a file of up to SMALL_BYTES, for people to compare, or a faster hash of a larger one."""
    algorithm = SHA256 if path.stat().st_size <= SMALL_BYTES else damage_hash()[0]
    return algorithm, _hexdigest(path, algorithm)


def _hexdigest(path: Path, algorithm: str) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, partial(new_hash, algorithm)).hexdigest()  # type: ignore[arg-type]


def integrity_error(folder: Path) -> str | None:
    """Check every byte of a folder that `write_folder` made. Return the defect, or None if it is intact."""
    try:
        files = _files(read_json(folder / MANIFEST))
    except (OSError, CheckpointError) as error:
        return f"no readable {MANIFEST} ({error})"
    if files is None:
        return f"no readable {MANIFEST} (it lists no files)"
    try:
        return _hash_error(folder, files.items(), full=True)
    except CheckpointError as error:
        return str(error)


def check_integrity(folder: Path, *, full: bool = False) -> bool:
    """Compare a model folder with its manifest, and return whether it has one.

    The policy of a run's step is listed in the manifest of the step, one folder up. Sizes are always compared. Hashes
    are compared for files up to SMALL_BYTES, or for all files if they total at most HASHED_BYTES or with `full`. Raises
    CheckpointError.
    """
    for root, prefix in ((folder, ""), (folder.parent, f"{folder.name}/")):
        manifest = root / MANIFEST
        if not manifest.is_file() or (prefix and folder.name != "policy"):
            continue
        files = {name: entry for name, entry in (_files(read_json(manifest)) or {}).items() if name.startswith(prefix)}
        if files:
            full = full or sum(size for size, _ in files.values()) <= HASHED_BYTES
            error = _first_error(root, tuple(files.items()), full, _stamps(root, files))
            if error:
                raise CheckpointError(f"{root}: {error} in {manifest}. {_remedy(folder, manifest, prefix)}")
            return True
    return False


def _remedy(folder: Path, manifest: Path, prefix: str) -> str:
    changed = f"copy {folder} elsewhere and use the copy" if prefix else f"remove {manifest}"
    return f"Copy or convert it again. If you changed it yourself, {changed}."


def _files(manifest: dict[str, Any]) -> Files | None:
    """Return the files that a slimectl manifest lists, or None if it lists none or another program wrote it.

    Raises CheckpointError for a name that points outside the folder.
    """
    listed = manifest.get("files")
    if not isinstance(listed, dict):
        return None
    files: Files = {}
    for name, entry in listed.items():
        fields = entry if isinstance(entry, dict) else {}
        size, digest = fields.get("bytes"), next((item for item in fields.items() if item[0] in ALGORITHMS), None)
        if not isinstance(size, int) or digest is None or not isinstance(digest[1], str):
            return None
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise CheckpointError(f"{MANIFEST} lists {name!r:.80}, which is not a file of its folder")
        if not is_card(name):  # people edit cards
            files[name] = size, digest
    return files


def _stamps(root: Path, files: Files) -> tuple[Any, ...]:
    """Return a cache key of the files' state, because a command opens a folder several times but hashes it once."""
    stamps = []
    for name in files:
        try:
            entry = os.stat(root / name)
            stamps.append((entry.st_mtime_ns, entry.st_ctime_ns, entry.st_size, entry.st_ino))
        except OSError:
            stamps.append((0, 0, -1, 0))
    return tuple(stamps)


@lru_cache(maxsize=64)
def _first_error(root: Path, files: tuple[tuple[str, tuple[int, Digest]], ...], full: bool, _: Any) -> str | None:
    """Return the defect of the first file that does not match. `_` is the cache key."""
    return _hash_error(root, files, full=full)


def _hash_error(root: Path, files: Iterable[tuple[str, tuple[int, Digest]]], *, full: bool) -> str | None:
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        errors = pool.map(lambda file: _file_error(root, *file, full=full), files)
        return next((error for error in errors if error), None)


def _file_error(root: Path, name: str, entry: tuple[int, Digest], *, full: bool) -> str | None:
    size, (algorithm, digest) = entry
    try:
        actual_size = check_file(root / name).st_size
    except FileNotFoundError:
        return f"{name} is missing"
    if actual_size != size:
        return f"{name} has {actual_size} bytes, not {size}"
    if (full or size <= SMALL_BYTES) and _hexdigest(root / name, algorithm) != digest:
        return f"{name} does not match its checksum"
    return None
