"""The base model of LoRA adapters: memory-mapped tensors, and a fingerprint that trainers and engines compare."""

from __future__ import annotations

import hashlib
from functools import cached_property, lru_cache
from pathlib import Path

from torch import Tensor

from slimectl.checkpoints.hf_weights import HFWeights
from slimectl.checkpoints.safetensors_io import MappedMemory
from slimectl.checkpoints.torch_dist.mapping import ModelCheckpoint
from slimectl.checkpoints.torch_dist.metadata import is_torch_dist
from slimectl.checkpoints.validate import HEAD, unfused
from slimectl.protocols import Weights

SAMPLED = 64
"""Number of elements of a tensor that the fingerprint covers."""


class BaseModel:
    """Tensors of a model folder, read on demand. Large tensors of Hugging Face files are memory-mapped.

    Raises CheckpointError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch_dist = is_torch_dist(folder)
        self._stored: Weights = ModelCheckpoint().open(folder) if torch_dist else HFWeights(folder, MappedMemory())
        self._weights = self._stored if torch_dist else unfused(self._stored, folder)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, in the cheapest reading order."""
        return {name: shape for name, (shape, _) in self._weights.forms().items()}

    def get(self, name: str) -> Tensor:
        return self._weights.get(name)

    @cached_property
    def fingerprint(self) -> str:
        """Return the BLAKE2b hash of 64 elements of every tensor: equal for copies in any dtype that holds the values.

        It distinguishes a model from the same model after one training step, but does not detect damage to single
        bytes. `engines/supervisor/bootstrap/merged_adapter.py` computes the same value in other servers.
        """
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(self._stored.forms()):
            # A tied head may or may not be stored.
            if name != HEAD and not name.endswith("rotary_emb.inv_freq"):
                flat = self._stored.get(name).reshape(-1)
                sample = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].float()
                digest.update(name.encode() + sample.numpy().tobytes())
        return digest.hexdigest()


def base_model(folder: Path) -> BaseModel:
    """Open a folder as a base model. Returns the same object as long as its files do not change."""
    return _base_model(folder, tuple(sorted(_stamp(file) for file in folder.iterdir())))


@lru_cache(maxsize=4)
def fingerprint(folder: Path) -> str:
    """Return the fingerprint of a model folder. It is read once, because a trainer's base model does not change."""
    return base_model(folder).fingerprint


@lru_cache(maxsize=4)
def _base_model(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> BaseModel:
    return BaseModel(folder)


def _stamp(file: Path) -> tuple[str, int, int]:
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns
