"""The base model of LoRA adapters: its tensors, mapped from its files, and the fingerprint that trainers compare."""

from __future__ import annotations

import hashlib
from functools import cached_property, lru_cache
from pathlib import Path

from torch import Tensor

from slimectl.checkpoints.hf_weights import HFWeights
from slimectl.checkpoints.safetensors_io import MappedMemory
from slimectl.checkpoints.torch_dist.mapping import ModelCheckpoint
from slimectl.checkpoints.torch_dist.metadata import is_torch_dist
from slimectl.checkpoints.validate import HEAD, UnfusedExperts
from slimectl.protocols import Weights

SAMPLED = 64
"""Elements of a tensor that count."""


class BaseModel:
    """Tensors of a model's folder, each read when it is asked for; large ones of Hugging Face's files are mapped.

    Raises CheckpointError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch_dist = is_torch_dist(folder)
        self._stored: Weights = ModelCheckpoint().open(folder) if torch_dist else HFWeights(folder, MappedMemory())
        self._weights = self._stored if torch_dist else UnfusedExperts(self._stored)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, in the order in which reading is cheapest."""
        return {name: shape for name, (shape, _) in self._weights.forms().items()}

    def get(self, name: str) -> Tensor:
        return self._weights.get(name)

    @cached_property
    def fingerprint(self) -> str:
        """BLAKE2b of 64 elements of every tensor: equal for copies of a model in any dtype that holds its values.

        It tells models apart that were trained, if only by one step, and finds no damage of single bytes.
        `engines/supervisor/bootstrap/merged_adapter.py` computes the same in the Python of other servers.
        """
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(self._stored.forms()):
            # A tied head may be stored or not.
            if name != HEAD and not name.endswith("rotary_emb.inv_freq"):
                flat = self._stored.get(name).reshape(-1)
                sample = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].float()
                digest.update(name.encode() + sample.numpy().tobytes())
        return digest.hexdigest()


def base_model(folder: Path) -> BaseModel:
    """Open a folder as a base model; the same object as before while its files are the same."""
    return _base_model(folder, tuple(sorted(_stamp(file) for file in folder.iterdir())))


@lru_cache(maxsize=4)
def fingerprint(folder: Path) -> str:
    """Return the fingerprint of a model's folder, which is read once: a trainer's base model stays as it is."""
    return base_model(folder).fingerprint


@lru_cache(maxsize=4)
def _base_model(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> BaseModel:
    return BaseModel(folder)


def _stamp(file: Path) -> tuple[str, int, int]:
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns
