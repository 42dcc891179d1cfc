"""Any box of any tensor of a torch_dist folder, put together from the chunks that overlap it."""

from __future__ import annotations

from functools import cached_property
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from slimectl.checkpoints.torch_dist.metadata import newest, read_metadata
from slimectl.errors import CheckpointError

Form = tuple[tuple[int, ...], torch.dtype]
Ints = tuple[int, ...]


class TorchDistReader:
    """Reads without Megatron and without a process group, one chunk at a time, whatever layout wrote it."""

    def __init__(self, folder: Path) -> None:
        self.folder = newest(folder)
        self._last: tuple[Any, Tensor] | None = None

    @cached_property
    def _metadata(self) -> Any:
        return read_metadata(self.folder)

    @cached_property
    def tensors(self) -> dict[str, Form]:
        """Shape and dtype of every tensor, optimizer states included; what is not a tensor is left out."""
        return {
            key: (tuple(facts.size), facts.properties.dtype)
            for key, facts in self._metadata.state_dict_metadata.items()
            if hasattr(facts, "chunks")
        }

    def read(self, key: str, offsets: Ints, sizes: Ints) -> Tensor:
        """The box of `sizes` at `offsets`. Raises CheckpointError where a part of it is missing or damaged."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        facts = self._metadata.state_dict_metadata[key]
        box, filled = None, 0
        for chunk in facts.chunks:
            start, end = _overlap(offsets, sizes, tuple(chunk.offsets), tuple(chunk.sizes))
            if any(a >= b for a, b in zip(start, end, strict=True)):
                continue
            values = self._chunk(key, chunk, facts.properties.dtype)
            part = _cut(values, tuple(chunk.offsets), start, end)
            if part.numel() < values.numel():
                self._last = MetadataIndex(key, chunk.offsets), values  # its other parts will be asked for next
            elif part.shape == sizes:
                return part
            box = torch.empty(sizes, dtype=part.dtype) if box is None else box
            _cut(box, offsets, start, end).copy_(part)
            filled += part.numel()
        if box is None or filled < prod(sizes):
            raise CheckpointError(f"{self.folder}: {key} lacks the chunk at {list(offsets)}; copy or save it again")
        return box

    def _chunk(self, key: str, chunk: Any, dtype: torch.dtype) -> Tensor:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        index = MetadataIndex(key, chunk.offsets)
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        self._last = None  # one chunk in memory, not two
        place = self._metadata.storage_data.get(index)
        if place is None:
            raise CheckpointError(
                f"{self.folder}: {key} lacks the chunk at {list(chunk.offsets)}; copy or save it again"
            )
        values = self._load(key, place)
        if values.shape != chunk.sizes or values.dtype != dtype:
            raise CheckpointError(
                f"{self.folder}/{place.relative_path}: {key} at {list(chunk.offsets)} is {values.dtype}"
                f" {list(values.shape)}, .metadata says {dtype} {list(chunk.sizes)}; copy or save it again"
            )
        return values

    def _load(self, key: str, place: Any) -> Tensor:
        path = self.folder / place.relative_path
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(f"{path}: {key} is stored {place.transform_descriptors[0]}-encoded; save it plainly")
        try:
            if path.stat().st_size < place.offset + place.length:
                raise ValueError(f"{path.stat().st_size} bytes, {key} ends at {place.offset + place.length}: cut short")
            from torch.distributed.checkpoint.utils import _create_file_view

            with path.open("rb") as file:
                view = _create_file_view(file, place.offset, place.length)
                values: Tensor = torch.load(cast("IO[bytes]", view), map_location="cpu", weights_only=True)
                return values.detach()
        except Exception as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{path}: cannot be read ({line}); copy or save it again") from error


def _overlap(offsets: Ints, sizes: Ints, chunk: Ints, extent: Ints) -> tuple[Ints, Ints]:
    start = tuple(max(a, b) for a, b in zip(offsets, chunk, strict=True))
    ends = (min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, chunk, extent, strict=True))
    return start, tuple(ends)


def _cut(values: Tensor, origin: Ints, start: Ints, end: Ints) -> Tensor:
    """The part of `values`, whose first element lies at `origin`, from `start` to `end`."""
    for axis, (zero, a, b) in enumerate(zip(origin, start, end, strict=True)):
        values = values.narrow(axis, a - zero, b - a)
    return values
