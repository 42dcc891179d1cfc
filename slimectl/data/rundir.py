"""A run on disk: metrics, checkpoints that are whole or absent, and where to go on from.

runs/NAME/  run.toml  manifest.json  metrics.jsonl  perf.jsonl  log.txt  latest -> step_000042
            step_000042/ manifest.json  state.json  policy/ …  samples.jsonl (if kept)
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slimectl.data.integrity import MANIFEST, integrity_error, sha256
from slimectl.errors import CheckpointError, SettingsError, StorageError

RESUME = ".resume"
"""Names the work that a staging folder belongs to."""

STEP = re.compile(r"step_(\d{6,})$")


@contextmanager
def explained_storage(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a StorageError that names the path and the way out."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error
    except Exception as error:
        # safetensors writes in Rust and wraps the system's error in its own, which is no OSError.
        if type(error).__name__ == "SafetensorError" and "os error" in str(error):
            raise storage_error(path, OSError(0, str(error).rpartition(": ")[2])) from error
        raise


def storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: {error.strerror or error}; nothing was left under that name; free space or write elsewhere"
    )


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a small file at once: readers see the old or the new text, never a part."""
    staged = path.with_name(f".tmp-{path.name}")
    try:
        with staged.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise storage_error(path, error) from error


def refuse_existing(target: Path, *, force: bool) -> None:
    """Raises SettingsError if `target` holds something that was not offered for replacement."""
    if not force and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target}: exists already; add --force to replace it, or name another")


def write_folder(
    target: Path,
    fill: Callable[[Path], Mapping[str, str] | None],
    *,
    about: dict[str, Any] | None = None,
    resume: str | None = None,
) -> None:
    """Make the folder `target` whole or not at all.

    `fill` writes into a staging folder beside it (and may return the SHA-256 of files that it knows); the files are
    fsynced, a manifest with sizes and SHA-256 is added (and `about`), the folder renamed, the parent fsynced. An older
    `target` stays until the new one is whole.

    `resume` names the work. With it an interruption leaves the staging folder, and the next call with the same name
    finds there what `fill` had written; an error leaves nothing.
    """
    staged = target.with_name(f".tmp-{target.name}")
    with explained_storage(target):
        try:
            _stage(staged, resume)
            known = fill(staged) or {}
            (staged / RESUME).unlink(missing_ok=True)
            files = {}
            for file in sorted(path for path in staged.rglob("*") if path.is_file()):
                with file.open("rb+") as handle:
                    os.fsync(handle.fileno())
                name = str(file.relative_to(staged))
                files[name] = {"bytes": file.stat().st_size, "sha256": known.get(name) or sha256(file)}
            write_text(staged / MANIFEST, json.dumps({**(about or {}), "files": files}, indent=2) + "\n")
            for folder in [path for path in staged.rglob("*") if path.is_dir()] + [staged]:
                sync_folder(folder)
            _replace_folder(staged, target)
        except BaseException as error:
            if resume is None or isinstance(error, Exception):
                shutil.rmtree(staged, ignore_errors=True)
            raise


def _stage(staged: Path, resume: str | None) -> None:
    """Empty the staging folder, unless it is what an interruption of the same work has left."""
    note = staged / RESUME
    if resume is None or not note.exists() or note.read_text() != resume:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
    if resume is not None:
        write_text(note, resume)


def _replace_folder(staged: Path, target: Path) -> None:
    old = target.with_name(f".old-{target.name}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(staged, target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


class RunDir:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def step(self, number: int) -> Path:
        return self.path / f"step_{number:06d}"

    def checkpoints(self) -> list[int]:
        """The rounds of all checkpoints that bear a final name, oldest first."""
        matches = [STEP.fullmatch(child.name) for child in self.path.glob("step_*") if (child / "policy").is_dir()]
        return sorted(int(match.group(1)) for match in matches if match)

    def start(self, settings_toml: str, *, force: bool = False) -> None:
        """Make the folder and write run.toml. Raises SettingsError if a run is already there.

        A run that failed before it had anything to show (no model to convert, say) is no run: it is replaced.
        """
        if (self.path / "run.toml").exists():
            begun = bool(self.checkpoints()) or any(file.stat().st_size for file in self.path.glob("*.jsonl"))
            if begun and not force:
                raise SettingsError(
                    f"{self.path}: holds a run already; add --resume to continue it, --force to replace it, "
                    f"or -s run.name=ANOTHER"
                )
            shutil.rmtree(self.path)
        with explained_storage(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / "run.toml", settings_toml)

    def save(self, number: int, fill: Callable[[Path], None]) -> None:
        """A checkpoint under step `number`, then `latest` on it."""
        write_folder(self.step(number), fill)
        with explained_storage(self.path / "latest"):
            staged = self.path / ".tmp-latest"
            staged.unlink(missing_ok=True)
            staged.symlink_to(self.step(number).name)
            os.replace(staged, self.path / "latest")
            sync_folder(self.path)

    def prune(self, keep: int | None) -> None:
        """Drop the oldest checkpoints beyond the newest `keep`; the samples that they kept stay."""
        for number in self.checkpoints()[: -keep if keep else 0]:
            folder = self.step(number)
            shutil.rmtree(folder / "policy", ignore_errors=True)
            if not (folder / "samples.jsonl").exists():
                shutil.rmtree(folder, ignore_errors=True)

    def newest(self, warn: Callable[[str], None]) -> Path:
        """The newest whole checkpoint; each damaged one on the way is reported. Raises CheckpointError if none is."""
        for number in reversed(self.checkpoints()):
            wrong = integrity_error(self.step(number))
            if wrong is None:
                return self.step(number)
            warn(f"{self.step(number)}: {wrong}; falling back to the checkpoint before it")
        raise CheckpointError(f"{self.path}: no whole checkpoint to resume from; start the run anew with --force")

    def sizes(self) -> dict[str, int]:
        """Bytes of each growing file now: a checkpoint records them, a resume cuts back to them."""
        return {file.name: file.stat().st_size for file in self.path.glob("*.jsonl")}

    def cut_back(self, sizes: dict[str, int]) -> None:
        """Forget what was written after a checkpoint, so that the continued files equal those of an undisturbed run."""
        for file in self.path.glob("*.jsonl"):
            with file.open("rb+") as handle:
                handle.truncate(sizes.get(file.name, 0))
