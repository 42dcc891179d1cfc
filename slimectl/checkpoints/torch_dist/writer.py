"""Chunks of tensors in, a torch_dist folder out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from slimectl.checkpoints.parts import HashedFile, file_bytes, grouped, one_ahead, write_parts
from slimectl.checkpoints.torch_dist.metadata import write_metadata

COMMON_STATE = {"checkpoint_version": 3.0, "iteration": 0}
"""What Megatron-LM looks for in common.pt of a model that was never trained."""


@dataclass(frozen=True)
class Chunk:
    """One box of the tensor `key`, whose whole has the shape `whole`; `load` reads it when its turn has come.

    `aliases` are other keys under which the same bytes are to be found.
    """

    key: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


def write_torch_dist(
    folder: Path, chunks: Sequence[Chunk], *, max_file_bytes: int | None = None, objects: Sequence[str] = ()
) -> dict[str, str]:
    """Write all chunks and what describes them; the SHA-256 of the .distcp files.

    `objects` are keys under which mcore looks for something that is no tensor; it finds None there. Two chunks are in
    memory at a time. Files of at most `max_file_bytes`; those that an interrupted call left whole stay.
    """
    most = max_file_bytes or file_bytes(sum(chunk.nbytes for chunk in chunks))
    groups = list(grouped(chunks, lambda chunk: chunk.nbytes, most))
    names = [f"__0_{i}.distcp" for i in range(len(groups) + bool(objects))]

    def write(i: int, file: HashedFile) -> list[tuple[int, int]]:
        return _write_file(file, groups[i]) if i < len(groups) else _write_nothing(file)

    places, hashes = write_parts(folder, names, write)
    placed = [
        (chunk, name, *place)
        for group, name, file in zip(groups, names, places, strict=False)
        for chunk, place in zip(group, file, strict=True)
    ]
    metadata = _metadata(placed)
    if objects:
        _add_objects(metadata, objects, names[-1], *places[-1][0])
    write_metadata(folder, metadata, COMMON_STATE)
    return hashes


def _write_file(file: HashedFile, chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Offset and length of each chunk's archive."""
    places = []
    for chunk, loaded in zip(chunks, one_ahead(chunk.load for chunk in chunks), strict=True):
        start = file.tell()
        tensor = loaded.reshape(chunk.sizes)
        assert tensor.dtype == chunk.dtype, chunk.key
        # torch.save writes a tensor's whole storage, also where the tensor is a part of it.
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        torch.save(tensor, cast("BinaryIO", file))
        places.append((start, file.tell() - start))
    return places


def _write_nothing(file: HashedFile) -> list[tuple[int, int]]:
    """A list of one None, as mcore writes the extra state of a module that has none."""
    torch.save([None], cast("BinaryIO", file))
    return [(0, file.tell())]


def _add_objects(metadata: Any, keys: Sequence[str], name: str, start: int, length: int) -> None:
    """Let all keys lead to the same bytes."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    for key in keys:
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo(name, start, length)


def _metadata(placed: Sequence[tuple[Chunk, str, int, int]]) -> Any:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )  # fmt: skip

    tensors: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for chunk, name, start, length in placed:
        for key in (chunk.key, *chunk.aliases):
            new = TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(chunk.whole), [])
            whole = tensors.setdefault(key, new)
            assert (whole.size, whole.properties.dtype) == (torch.Size(chunk.whole), chunk.dtype), key
            index = MetadataIndex(key, chunk.offsets, len(whole.chunks))
            whole.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
            storage[index] = _StorageInfo(name, start, length)
    return Metadata(tensors, storage_data=storage)
