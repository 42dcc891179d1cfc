"""Saving a trainer's state as a stream of tensors, at once or in the background, and which of it is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from slimectl.errors import CheckpointError
from slimectl.policies.options import TrainerOptions
from slimectl.system.stdio import logger

Tensors = Iterable[tuple[str, Tensor]]


@dataclass
class SaveStreams:
    """Streams of full tensors, in the order in which ranks gather them, each with the function that writes it."""

    finish: Callable[[Path], None]
    """Writes what is not a tensor, after the streams."""
    parts: list[tuple[Tensors, Callable[[Path, Any], object]]] = field(default_factory=list)

    def add(self, tensors: Tensors, write: Callable[[Path, Any], object]) -> None:
        self.parts.append((tensors, write))

    def write(self, path: Path) -> None:
        for tensors, write in self.parts:
            write(path, iter(tensors))
        self.finish(path)

    def drain(self) -> None:
        """Take part in gathering, without keeping anything."""
        for tensors, _ in self.parts:
            for _ in tensors:
                pass

    def copy_to_host(self) -> None:
        """Replace the streams by copies in host memory."""
        self.parts = [
            ([(name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors], write)
            for tensors, write in self.parts
        ]


class StreamSaver:
    """Base class of trainers that save streams. Rank 0 writes, and the other ranks take part in gathering."""

    _writing: Future[None] | None = None
    """The write in the background that `is_saved` has not reported yet."""

    def _streams(self) -> SaveStreams:
        """Return everything to save, as it is now."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Write weights as a Hugging Face directory, with the trainer's state in a subfolder.

        Adapters are merged into the weights, and also written to the folder `adapter` (peft's format).
        """
        streams = self._streams()
        if _is_writer():
            streams.write(path)
        else:
            streams.drain()
        if dist.is_available() and dist.is_initialized():
            dist.barrier()

    def save_in_background(self, path: Path) -> None:
        """Copy the state to host memory, and write it while training continues. `is_saved` tells when it is done."""
        assert self._writing is None, "the previous save is still being written"
        streams = self._streams()
        if not _is_writer():
            return streams.drain()
        streams.copy_to_host()
        future = self._writing = Future[None]()

        def write() -> None:
            try:
                streams.write(path)
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=write, name="checkpoint", daemon=True).start()
        return None

    def is_saved(self) -> bool:
        """Return whether the last save in the background is complete. Raises the error that ended it."""
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            writing.result()
        return self._writing is None


def _is_writer() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def reads_moments(path: Path, state: Mapping[str, Any], options: TrainerOptions) -> bool:
    """Return whether to load the moments of a checkpoint with this trainer.json. Logs why a trainer gets none.

    Raises CheckpointError if another optimizer saved them.
    """
    if not options.trains:
        return False
    if not options.loads_moments:
        logger.warning(f"{path}: the optimizer's moments start at zero (train.no_load_optim)")
        return False
    if not state.get("has_moments", True):
        logger.warning(f"{path}: saved without the optimizer's moments (train.no_save_optim), which start at zero")
        return False
    saved = state.get("optimizer", {}).get("name", "adamw")
    if saved != options.optimizer.name:
        raise CheckpointError(
            f"{path}: saved with train.optimizer = {saved!r}, which has other moments than {options.optimizer.name!r}."
            f" Set train.optimizer={saved}, or start with new moments: -s train.no_load_optim=true"
        )
    return True
