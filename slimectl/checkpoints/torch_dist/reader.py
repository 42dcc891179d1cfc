"""Reads any box of any tensor of a torch_dist folder, assembled from the chunks that overlap it."""

from __future__ import annotations

import os
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimectl.checkpoints.safetensors_io import TensorMemory
from slimectl.checkpoints.torch_dist.archive import load_tensor
from slimectl.checkpoints.torch_dist.metadata import newest, read_metadata
from slimectl.errors import CheckpointError, first_line
from slimectl.system.model_files import open_file

Form = tuple[tuple[int, ...], torch.dtype]
Ints = tuple[int, ...]


class TorchDistReader:
    """Reads tensors without Megatron or a process group, one chunk at a time, whatever parallel layout wrote them."""

    def __init__(self, folder: Path, memory: TensorMemory | None = None) -> None:
        self.folder, self._memory = newest(folder), memory
        self._last: tuple[Any, Tensor] | None = None

    @cached_property
    def _metadata(self) -> Any:
        return read_metadata(self.folder)

    @cached_property
    def tensors(self) -> dict[str, Form]:
        """Return shape and dtype of every tensor, optimizer states included. Other objects are left out."""
        return {
            key: (tuple(entry.size), entry.properties.dtype)
            for key, entry in self._metadata.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        }

    def read(self, key: str, offsets: Ints, sizes: Ints) -> Tensor:
        """Read the box of size `sizes` at `offsets`. Raises CheckpointError if a part of it is missing or damaged."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        entry, box = self._metadata.state_dict_metadata[key], None
        for chunk, start, end in self._parts(key, offsets, sizes):
            values = self._chunk(key, chunk, entry.properties.dtype)
            part = _cut(values, tuple(chunk.offsets), start, end)
            if part.numel() < values.numel():
                self._last = MetadataIndex(key, chunk.offsets), values  # its other parts will be read next
            elif part.shape == sizes:
                return part
            box = self._empty(key, sizes, part.dtype) if box is None else box
            _cut(box, offsets, start, end).copy_(part)
        assert box is not None
        return box

    def _parts(self, key: str, offsets: Ints, sizes: Ints) -> list[tuple[Any, Ints, Ints]]:
        """Return (chunk, start, end) for the parts of the box, covering each element once. Raises CheckpointError."""
        entry = self._metadata.state_dict_metadata[key]
        parts: list[tuple[Any, Ints, Ints]] = []
        for chunk in entry.chunks:
            start, end = _overlap(offsets, sizes, tuple(chunk.offsets), tuple(chunk.sizes))
            if all(a < b for a, b in zip(start, end, strict=True)):
                if any(_intersects(start, end, *bounds) for _, *bounds in parts):
                    raise CheckpointError(f"{self.folder}: chunks of {key} overlap at {list(start)}. Save it again.")
                parts.append((chunk, start, end))
        count = sum(prod(b - a for a, b in zip(start, end, strict=True)) for _, start, end in parts)
        if not parts or count < prod(sizes):
            raise CheckpointError(f"{self.folder}: {key} lacks the chunk at {list(offsets)}. Copy or save it again.")
        return parts

    def _empty(self, key: str, sizes: Ints, dtype: torch.dtype) -> Tensor:
        """Allocate a box of several chunks. Raises CheckpointError if the files are too small to hold them all."""
        if prod(sizes) * dtype.itemsize > sum(file.stat().st_size for file in self.folder.glob("*.distcp")):
            raise CheckpointError(f"{self.folder}: {key} is larger than all its files. Copy or save it again.")
        return torch.empty(sizes, dtype=dtype)

    def _chunk(self, key: str, chunk: Any, dtype: torch.dtype) -> Tensor:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        index = MetadataIndex(key, chunk.offsets)
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        self._last = None  # keep one chunk in memory, not two
        location = self._metadata.storage_data.get(index)
        if location is None:
            raise CheckpointError(
                f"{self.folder}: {key} lacks the chunk at {list(chunk.offsets)}. Copy or save it again."
            )
        return self._load(key, location, tuple(chunk.sizes), dtype)

    def _load(self, key: str, location: Any, shape: Ints, dtype: torch.dtype) -> Tensor:
        path = self.folder / location.relative_path
        if location.transform_descriptors:
            raise CheckpointError(
                f"{path}: {key} is stored {location.transform_descriptors[0]}-encoded. Save it without encoding."
            )
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < location.offset + location.length:
                    raise ValueError(
                        f"{size} bytes, but {key} ends at {location.offset + location.length}, so it is truncated"
                    )
                form: dict[str, Any] = {"shape": shape, "dtype": dtype, "memory": self._memory}
                return load_tensor(file, location.offset, location.length, **form)
        except CheckpointError:
            raise
        except Exception as error:
            line = first_line(error)
            raise CheckpointError(f"{path}: cannot be read ({line}). Copy or save it again.") from error


def _overlap(offsets: Ints, sizes: Ints, chunk: Ints, extent: Ints) -> tuple[Ints, Ints]:
    start = tuple(max(a, b) for a, b in zip(offsets, chunk, strict=True))
    ends = (min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, chunk, extent, strict=True))
    return start, tuple(ends)


def _intersects(start: Ints, end: Ints, other_start: Ints, other_end: Ints) -> bool:
    """Return whether two boxes have an element in common."""
    axes = zip(start, end, other_start, other_end, strict=True)
    return all(max(a, c) < min(b, d) for a, b, c, d in axes)


def _cut(values: Tensor, origin: Ints, start: Ints, end: Ints) -> Tensor:
    """Return the part of `values` (with first element at `origin`) from `start` to `end`."""
    for axis, (zero, a, b) in enumerate(zip(origin, start, end, strict=True)):
        values = values.narrow(axis, a - zero, b - a)
    return values
