"""Weight sync by disk: writes a checkpoint that every engine reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slimectl.data.atomic_replace import staging, storage_errors
from slimectl.data.ownership import remove_made
from slimectl.engines.weight_sync.base import Precision, WeightSyncBase, cast, drained
from slimectl.errors import SettingsError
from slimectl.protocols import NamedTensors, WeightUpdateClient
from slimectl.types import Metrics

Write = Callable[[Path, NamedTensors], None]
"""Fills an empty folder with a complete Hugging Face checkpoint: these tensors, config and tokenizer. Picklable."""

OnWritten = Callable[[Path, WeightUpdateClient], None]
"""Called with the folder or delta file of a version, after it is written and before these engines read it."""


@dataclass(eq=False)
class FileSync(WeightSyncBase):
    """Pushes through files in `folder`, which engines must be able to read."""

    folder: Path
    write: Write
    keep_files: bool = False
    wrote: OnWritten | None = None


class DiskSync(FileSync):
    """Writes one folder per version, which stays until the next one is in use.

    It is written while the engines still sample. They pause only to read it. A restarted engine reads the newest one.
    """

    _newest: tuple[str, Path] | None = None

    def _push(self, workers: WeightUpdateClient, version: str) -> Metrics:
        previous, bytes_written = self._newest, 0
        target = self.folder / f"weights_{version}"
        if previous is None or previous[0] != version:
            fill = partial(write_checkpoint, target=target, write=self.write, dtype=self.dtype)
            bytes_written = self.policy.consume_weights(fill)
            if self.wrote is not None:
                self.wrote(target, workers)
        try:
            with self.paused(workers) as watch:
                workers.load_disk(target, version=version)
        except BaseException:
            if bytes_written:
                remove_made(target)
            raise
        self._newest = version, target
        if bytes_written and previous is not None and not self.keep_files:
            remove_made(previous[1])
        return {"bytes": float(bytes_written), "pause_time": watch.seconds}

    def close(self) -> None:
        if self._newest is not None and not self.keep_files:
            remove_made(self._newest[1])
            self._newest = None


def write_checkpoint(tensors: NamedTensors, *, target: Path, write: Write, dtype: Precision) -> int:
    """Write the folder `target`, completely or not at all. Returns the bytes of its weights.

    It keeps the mark of a folder that may be removed. Raises StorageError, or SettingsError if slimectl did not make
    `target`.
    """
    staged = target.with_name(f".tmp-{target.name}")
    try:
        with drained(tensors) as stream, storage_errors(target):
            staging(target, None)
            write(staged, cast(stream, dtype))
            size = sum(file.stat().st_size for file in staged.glob("*.safetensors"))
            clear_pushed(target)
            staged.rename(target)
    except SettingsError:
        raise  # slimectl did not make this folder
    except BaseException:
        remove_made(staged)
        raise
    return size


def clear_pushed(folder: Path) -> None:
    """Remove an earlier push of weights, if there is one. Raises SettingsError if slimectl did not make the folder."""
    if os.path.lexists(folder) and not remove_made(folder):
        raise SettingsError(
            f"{folder}: slimectl did not write it, but pushes weights under that name. Set sync.update_weight_disk_dir "
            "to an empty folder."
        )
