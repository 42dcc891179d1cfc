"""The folder of a run: metrics, checkpoints that are complete or absent, and resuming.

runs/NAME/  manifest.json  run.toml  metrics.jsonl  perf.jsonl  log.txt  latest -> step_000042
            step_000042/ manifest.json  state.json  policy/ …  trainer/ …  samples.jsonl  train_data.jsonl (if kept)
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slimectl import __version__
from slimectl.data import ownership
from slimectl.data.atomic_replace import (
    RESUME,
    recover,
    refuse_existing,
    replace_folder,
    staging,
    storage_errors,
    sync_folder,
    write_text,
    writing,
)
from slimectl.data.hashing import Digest
from slimectl.data.locks import Lock
from slimectl.data.manifest import file_digest, integrity_error
from slimectl.data.ownership import GROWING, LOCK, MANIFEST, STAGED
from slimectl.errors import CheckpointError, SettingsError
from slimectl.system.model_files import TRAINER_STATE, linked_step

STEP = re.compile(r"step_(\d{6,})$")
BEST = "best"
"""Link to the checkpoint with the best evaluation (run.save_best)."""


def write_folder(
    target: Path,
    fill: Callable[[Path], Mapping[str, Digest] | None],
    *,
    manifest_fields: dict[str, Any] | None = None,
    resume: str | None = None,
    names: re.Pattern[str] | None = None,
) -> None:
    """Write the folder `target` atomically: complete or not at all.

    `fill` writes into a staging folder next to it, and may return known digests by file. Then the files are fsynced, a
    manifest with `manifest_fields`, sizes and digests is added, the folder is renamed, and its parent is fsynced. An
    older `target` stays until the new one is complete. The user's files in it move into the new one.

    `resume` identifies the work. With it, an interruption leaves the staging folder, and the next call with the same
    identifier finds there what `fill` had written. An error leaves nothing. `names` is given within a locked folder of
    slimectl. Files that match it belong to slimectl there, whether or not a manifest lists them.

    Raises SettingsError if another process is writing `target`, or if slimectl did not create it. Raises StorageError
    for OS errors.
    """
    with storage_errors(target), ExitStack() as ending:
        if names is None:
            lock = writing(target)
            if not lock.is_ours():
                ending.enter_context(lock)
            recover(target)
            refuse_existing(target, force=True)
        else:
            recover(target, names)
            ownership.remove_staged(target.with_name(f".tmp-{target.name}"))
        staged = staging(target, resume)
        try:
            if resume is not None:
                write_text(staged / RESUME, resume)
            hashes = fill(staged) or {}
            _sign(staged, hashes, manifest_fields or {})
            replace_folder(staged, target, names)
        except BaseException as error:
            if resume is None or isinstance(error, Exception):
                ownership.remove_staged(staged)
            raise


def _sign(staged: Path, hashes: Mapping[str, Digest], manifest_fields: dict[str, Any]) -> None:
    """Sync every file of a staging folder to disk and list it in the manifest.

    Files get the mode that the umask gives to new files, because safetensors 0.8 and huggingface_hub create files as
    0600.
    """
    (staged / RESUME).unlink(missing_ok=True)
    mode = stat.S_IMODE((staged / STAGED).stat().st_mode)
    files = {}
    for file in sorted(path for path in staged.rglob("*") if path.is_file() and path != staged / STAGED):
        with file.open("rb+") as handle:
            with suppress(OSError):  # a file system without modes
                os.fchmod(handle.fileno(), mode)
            os.fsync(handle.fileno())
        name = str(file.relative_to(staged))
        algorithm, digest = hashes.get(name) or file_digest(file)
        files[name] = {"bytes": file.stat().st_size, algorithm: digest}
    write_text(staged / MANIFEST, json.dumps({**manifest_fields, "files": files}, indent=2) + "\n")
    (staged / STAGED).unlink(missing_ok=True)
    for folder in [path for path in staged.rglob("*") if path.is_dir()] + [staged]:
        sync_folder(folder)


class RunDir:
    """The folder of one run.

    Its manifest, the first file written there, marks it as a run. `ownership` defines which files belong to the run.
    All others are the user's and stay unchanged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def step(self, number: int) -> Path:
        return self.path / f"step_{number:06d}"

    def checkpoints(self) -> list[int]:
        """Return the rounds of all complete checkpoints, oldest first."""
        matches = [STEP.fullmatch(child.name) for child in self.path.glob("step_*") if _is_checkpoint(child)]
        return sorted(int(match.group(1)) for match in matches if match)

    # --- ownership ---------------------------------------------------------------------------------------------------

    def lock(self, *, warn: Callable[[str], None] = lambda text: None) -> Lock:
        """Lock the folder for the duration of a run, creating it if needed.

        Raises SettingsError, with the process that holds the lock, if another run is active there.
        """
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        return Lock(
            self.path / LOCK,
            f"{self.path}: another run is active there",
            way_out="Wait until it ends, stop it, or choose another name with -s run.name=ANOTHER.",
            warn=warn,
        ).acquire()

    def check_start(self) -> None:
        """Raise SettingsError if no run can start here because the folder is not a run's. Nothing is changed."""
        if not os.path.lexists(self.path):
            return
        if not self.path.is_dir():
            raise SettingsError(
                f"{self.path}: is not a folder. Choose another name for the run with -s run.name=ANOTHER."
            )
        strangers = [child.name for child in self.path.iterdir() if not ownership.UNSIGNED.fullmatch(child.name)]
        if strangers and not ownership.is_run(self.path):
            is_old = (self.path / "run.toml").exists()
            old = ", or continue a run of an older version with --resume RUN" if is_old else ""
            raise SettingsError(
                f"{self.path}: contains {min(strangers)!r} but no manifest.json of a run, so slimectl does not write "
                f"there. Choose another name for the run with -s run.name=ANOTHER{old}."
            )

    def check_free(self) -> None:
        """Raise SettingsError if the folder holds a run with any output."""
        if ownership.is_run(self.path) and self._has_output():
            raise SettingsError(
                f"{self.path}: already holds a run. Continue it with --resume {self.path}, replace it "
                f"with --force, or use another folder with -s run.name=ANOTHER."
            )

    def start(
        self,
        settings_toml: str,
        *,
        force: bool = False,
        manifest: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create the folder, and write its `manifest` (stage, settings, host) and run.toml.

        The files of a run that failed before any output (because of a missing model, for example) are replaced. Raises
        SettingsError if a run exists already and `force` is false, or if the folder is not a run's.
        """
        self.check_start()
        if not force:
            self.check_free()
        if ownership.is_run(self.path):
            self._clear(warn)
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self._sign(manifest)
        with storage_errors(self.path):
            self._sweep()
        write_text(self.path / "run.toml", settings_toml)

    def _has_output(self) -> bool:
        return bool(self.checkpoints()) or any(ownership.file_size(self.path / name) for name in GROWING)

    def discard(self) -> None:
        """Remove a run that failed before its first output, unless a log explains it. The user's files stay."""
        if self._has_output() or any(map(ownership.file_size, self.path.glob("logs/*"))):
            return
        with suppress(OSError):
            ownership.remove_files(self.path, ownership.own_run_files(self.path))
            for folder in (self.path, self.path.parent):  # each only if it is empty
                folder.rmdir()

    def _sign(self, manifest: Mapping[str, Any] | None) -> None:
        signed = {"slimectl": __version__, **(manifest or {}), "stage": "run"}
        write_text(self.path / MANIFEST, json.dumps(signed, indent=2, default=str) + "\n")

    def _clear(self, warn: Callable[[str], None]) -> None:
        """Remove the files of a run, its manifest last. Warn about remaining files."""
        if self.path.is_symlink():
            raise SettingsError(
                f"{self.path}: is a link, and slimectl removes nothing through a link. Give the run's folder itself "
                f"({self.path.resolve()}), or -s run.name=ANOTHER."
            )
        ownership.refuse_links(self.path, "its run cannot be replaced")
        with storage_errors(self.path):
            for old in [*self.path.glob(".old-*"), *self.path.glob("reference/.old-*")]:
                ownership.remove_made(old)
            ownership.remove_files(self.path, ownership.own_run_files(self.path))
            remains = [name for name in ownership.files_below(self.path) if name != LOCK]
        if remains:
            more = f" and {len(remains) - 3} more" if len(remains) > 3 else ""
            warn(f"{self.path}: {', '.join(remains[:3])}{more} left in place, because slimectl did not write it")

    # --- resuming ----------------------------------------------------------------------------------------------------

    def check_command(self, command: str) -> None:
        """Raise SettingsError if another command started the run. Runs of older versions belong to `slimectl run`."""
        first = (ownership.read_manifest(self.path) or {}).get("command", "run")
        if first != command:
            raise SettingsError(
                f"{self.path}: was started by `slimectl {first}`. Continue with: slimectl {first} --resume {self.path}"
            )

    def adopt(self, manifest: Mapping[str, Any] | None = None) -> None:
        """Prepare a folder for a resume: remove the incomplete files of a killed run.

        A run of an older version, which wrote its manifest only at its end, gets one now. Raises SettingsError if there
        is no run.
        """
        if not (self.path / "run.toml").exists():
            raise SettingsError(f"{self.path}: no run to resume. Start it without --resume.")
        signed = ownership.is_run(self.path)
        if not signed and not ownership.is_older_run(self.path):
            raise SettingsError(
                f"{self.path}: has a run.toml, but no manifest.json and no files of a run. Start a run with these "
                f"settings elsewhere: slimectl run -c {shlex.quote(str(self.path / 'run.toml'))} -s run.name=ANOTHER"
            )
        ownership.refuse_links(self.path, "its run cannot continue", only=(*GROWING, MANIFEST))
        with storage_errors(self.path):
            self._sweep()
            for push in self.path.glob("weights/*"):
                if ownership.PUSHES.fullmatch(push.name) and push.is_dir() and not push.is_symlink():
                    (push / STAGED).touch()  # earlier versions did not mark the folders of weight pushes
        if not signed or "finished" in (ownership.read_manifest(self.path) or {}):
            self._sign(manifest)

    @property
    def next_round(self) -> int:
        """Return the round after the newest checkpoint."""
        return max(self.checkpoints(), default=0) + 1

    def change_settings(self, settings_toml: str, changes: Sequence[str], *, first: int) -> None:
        """Write the settings of a resume to run.toml, with the `first` round and the changes as comments."""
        path = self.path / "run.toml"
        notes = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        resumed = f"# {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}, slimectl {__version__}: resumed at round {first} with"
        lines = [f"#   {' '.join(change.splitlines())}" for change in changes]
        with storage_errors(path):
            write_text(path, "\n".join([settings_toml, *notes, resumed, *lines, ""]))

    def _sweep(self) -> None:
        """Remove incomplete files of a killed run, and finish interrupted renames."""
        for parent in (self.path, self.path / "reference"):
            for old in parent.glob(".old-*"):
                recover(old.with_name(old.name.removeprefix(".old-")), ownership.CHECKPOINT_FILES)
        ownership.remove_files(
            self.path, [name for name in ownership.own_run_files(self.path) if ownership.HALF_WRITTEN.fullmatch(name)]
        )
        for staged in [*self.path.glob(".tmp-*"), *self.path.glob("reference/.tmp-*")]:
            if ownership.TEMPORARY.fullmatch(staged.name):
                ownership.remove_staged(staged)  # its empty folders
        for name in ("latest", BEST):
            link, step = self.path / name, linked_step(self.path, name)
            if (link.is_symlink() and not link.exists()) or (step and not (self.path / step).exists()):
                link.unlink()

    def save(self, number: int, fill: Callable[[Path], None]) -> None:
        """Write a checkpoint of step `number`, then point `latest` to it."""
        write_folder(self.step(number), fill, names=ownership.CHECKPOINT_FILES)
        self.point_latest(self.step(number))

    def point_latest(self, checkpoint: Path) -> None:
        """Point `latest` to a checkpoint, unless it already does."""
        self._point("latest", checkpoint)

    def point_best(self, checkpoint: Path) -> None:
        """Point `best` to a checkpoint, which `prune` keeps from then on."""
        self._point(BEST, checkpoint)

    @property
    def best(self) -> Path | None:
        """Return the checkpoint that `best` points to."""
        step = linked_step(self.path, BEST)
        return self.path / step if step else None

    def _point(self, name: str, checkpoint: Path) -> None:
        """Write a link to a checkpoint, or a file with its name if the file system has no links."""
        link = self.path / name
        with storage_errors(link):
            if linked_step(self.path, name) == checkpoint.name:
                return
            staged = self.path / f".tmp-{name}"
            staged.unlink(missing_ok=True)
            try:
                staged.symlink_to(checkpoint.name)
            except OSError:
                staged.write_text(f"{checkpoint.name}\n", encoding="utf-8")
            os.replace(staged, link)
            sync_folder(self.path)

    def prune(self, keep: int | None) -> None:
        """Remove all but the best and the newest `keep` checkpoints. Their saved samples and links stay."""
        for number in self.checkpoints()[: -keep if keep else 0]:
            folder = self.step(number)
            if folder.is_symlink() or folder == self.best:
                continue
            names = ownership.own_files(folder, ownership.CHECKPOINT_FILES)
            if any((folder / name).exists() for name in ownership.ROUND_FILES):
                names = [name for name in names if name.partition("/")[0] in ("policy", "critic", TRAINER_STATE)]
            ownership.remove_files(folder, names)
            with suppress(OSError):
                folder.rmdir()

    def newest(self, warn: Callable[[str], None]) -> Path:
        """Return the newest intact checkpoint with complete metrics. `warn` gets a message for each rejected one.

        Raises CheckpointError if there is none.
        """
        fallback = None
        for number in reversed(self.checkpoints()):
            folder = self.step(number)
            if (reason := integrity_error(folder)) is None:
                fallback = folder
                if (reason := self.lost_metrics(folder)) is None:
                    return folder
            warn(f"{folder}: {reason}. Falling back to the previous checkpoint.")
        if fallback is not None:
            raise CheckpointError(
                f"{self.path}: metrics.jsonl is shorter than at every checkpoint. Restore it from a copy, or start a "
                f"new run from the weights: --model {shlex.quote(str(fallback))}"
            )
        raise CheckpointError(f"{self.path}: no intact checkpoint to resume from. Start the run again with --force.")

    # --- growing files -----------------------------------------------------------------------------------------------

    def sizes(self) -> dict[str, int]:
        """Sync each growing file to disk and return its size, which a checkpoint records for a resume."""
        present = [name for name in GROWING if (self.path / name).exists()] + self._event_files()
        for name in present:
            with storage_errors(self.path / name), (self.path / name).open("rb+") as handle:
                os.fsync(handle.fileno())
        # The entry of the folder itself marks a checkpoint that records TensorBoard files. Older versions did not.
        return {"tensorboard/": 0} | {name: (self.path / name).stat().st_size for name in present}

    def _event_files(self) -> list[str]:
        """Return the names of the TensorBoard files in this folder, oldest first. Links are the user's."""
        folder = self.path / "tensorboard"
        if folder.is_symlink():
            return []
        files = sorted(f"tensorboard/{file.name}" for file in folder.glob("events.out.tfevents.*"))
        return [name for name in files if ownership.EVENTS.fullmatch(name) and not (self.path / name).is_symlink()]

    def cut_back(self, sizes: dict[str, int]) -> None:
        """Truncate the growing files to their sizes at a checkpoint, so that they match an uninterrupted run.

        A shorter file is not extended: lost content must not be replaced by zeros.
        """
        for name in self._event_files() if "tensorboard/" in sizes or not sizes else ():
            if name not in sizes:
                with storage_errors(self.path / name):
                    (self.path / name).unlink()
        for name in (*GROWING, *(name for name in self._event_files() if name in sizes)):
            file = self.path / name
            if file.exists() and file.stat().st_size > sizes.get(name, 0):
                with storage_errors(file), file.open("rb+") as handle:
                    handle.truncate(sizes.get(name, 0))
                    os.fsync(handle.fileno())

    def lost_metrics(self, folder: Path) -> str | None:
        """Return a description of metrics missing from before a checkpoint, or None if they are complete."""
        try:
            size = int(json.loads((folder / "state.json").read_text())["sizes"].get("metrics.jsonl", 0))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # the reader of the state reports its defects
        present = ownership.file_size(self.path / "metrics.jsonl")
        return f"metrics.jsonl has {present} bytes, but had {size} when it was saved" if present < size else None


def _is_checkpoint(folder: Path) -> bool:
    files = ownership.files_below(folder / "policy")
    is_pruned = bool(files) and all(map(ownership.is_card, files))  # the user's card stayed
    return (
        (folder / "policy").is_dir() and not is_pruned and any((folder / n).exists() for n in (MANIFEST, "state.json"))
    )
