"""Reads PyTorch's pickled weights (pytorch_model.bin and its shards) for conversion to safetensors."""

from __future__ import annotations

import pickle
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from slimectl.checkpoints.safetensors_io import CODE, TensorSpec
from slimectl.errors import CheckpointError, first_line
from slimectl.system.model_files import check_file


class PickleFile:
    """A memory-mapped file of torch.save with a state dict. torch.load(weights_only=True) runs no code from it.

    Raises CheckpointError for a file that holds anything but named tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        check_file(self.path)
        try:
            loaded = _load(self.path)
        except (RuntimeError, ValueError, EOFError, OSError, LookupError, pickle.UnpicklingError) as error:
            line = first_line(error)
            raise CheckpointError(f"{self.path}: cannot be read as pickled weights ({line:.200})") from error
        if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
            loaded = loaded["state_dict"]  # written by Lightning
        size = self.path.stat().st_size
        if not isinstance(loaded, dict) or not all(_is_plain(*item, size) for item in loaded.items()):
            raise CheckpointError(
                f"{self.path}: holds more than named tensors. Give a file with only the model's weights."
            )
        return dict(loaded)

    def forms(self) -> dict[str, TensorSpec]:
        """Return shape and dtype of every tensor, in file order."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def get(self, name: str) -> Tensor:
        return self._tensors[name].detach().contiguous()


def pickled_shards(path: Path) -> list[Path]:
    """Return the pickled weight files of a directory."""
    return sorted(path.glob("pytorch_model*.bin"))


def _load(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6


def _is_plain(name: object, tensor: object, size: int) -> bool:
    """Return whether an entry is a named tensor that fits in a file of that size. A view may exceed its storage."""
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        return False
    return not tensor.is_sparse and tensor.dtype in CODE and tensor.nbytes <= size
