"""Writes chunks of tensors as a torch_dist folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from slimectl.checkpoints.resumable_write import HashedFile, file_bytes, grouped, one_ahead, write_parts
from slimectl.checkpoints.torch_dist.metadata import write_metadata
from slimectl.data.hashing import Digest

COMMON_STATE = {"checkpoint_version": 3.0, "iteration": 0}
"""Content of common.pt that Megatron-LM requires, for an untrained model."""

ALIGNMENT = 64
"""Alignment of archives, and of the data within them, in bytes, so that tensors can be mapped directly."""


@dataclass(frozen=True)
class Chunk:
    """One box of the tensor `key` of shape `tensor_shape`. `load` reads it when it is written.

    `aliases` are other keys for the same bytes.
    """

    key: str
    tensor_shape: tuple[int, ...]
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
) -> dict[str, Digest]:
    """Write all chunks and their metadata. Return the digests of the .distcp files.

    `objects` are keys of objects other than tensors that mcore requires. None is stored for them. Two chunks are in
    memory at a time. Files have at most `max_file_bytes`. Complete files of an interrupted call are kept.
    """
    max_bytes = max_file_bytes or file_bytes(sum(chunk.nbytes for chunk in chunks))
    groups = list(grouped(chunks, lambda chunk: chunk.nbytes, max_bytes))
    names = [f"__0_{i}.distcp" for i in range(len(groups) + bool(objects))]

    def write(i: int, file: HashedFile) -> list[tuple[int, int]]:
        return _write_file(file, groups[i]) if i < len(groups) else _write_empty_object(file)

    with _without_crc32():
        locations, hashes = write_parts(folder, names, write)
    located_chunks = [
        (chunk, name, *location)
        for group, name, file in zip(groups, names, locations, strict=False)
        for chunk, location in zip(group, file, strict=True)
    ]
    metadata = _metadata(located_chunks)
    if objects:
        _add_objects(metadata, objects, names[-1], *locations[-1][0])
    write_metadata(folder, metadata, COMMON_STATE)
    return hashes


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Disable torch.save's checksums, which torch never verifies and which take as long as the writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _write_file(file: HashedFile, chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Write the chunks. Return offset and length of each archive."""
    locations = []
    for chunk, loaded in zip(chunks, one_ahead(chunk.load for chunk in chunks), strict=True):
        file.write(bytes(-file.tell() % ALIGNMENT))
        start = file.tell()
        tensor = loaded.reshape(chunk.sizes)
        assert tensor.dtype == chunk.dtype, chunk.key
        # torch.save writes the full storage, even if the tensor is only a part of it.
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        torch.save(tensor, cast("BinaryIO", file))
        locations.append((start, file.tell() - start))
    return locations


def _write_empty_object(file: HashedFile) -> list[tuple[int, int]]:
    """Write a list of one None, which mcore uses for a module without extra state."""
    torch.save([None], cast("BinaryIO", file))
    return [(0, file.tell())]


def _add_objects(metadata: Any, keys: Sequence[str], name: str, start: int, length: int) -> None:
    """Add metadata entries that map all keys to the same bytes."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    for key in keys:
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo(name, start, length)


def _metadata(located_chunks: Sequence[tuple[Chunk, str, int, int]]) -> Any:
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
    for chunk, name, start, length in located_chunks:
        for key in (chunk.key, *chunk.aliases):
            new = TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(chunk.tensor_shape), [])
            entry = tensors.setdefault(key, new)
            assert (entry.size, entry.properties.dtype) == (torch.Size(chunk.tensor_shape), chunk.dtype), key
            index = MetadataIndex(key, chunk.offsets, len(entry.chunks))
            entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
            storage[index] = _StorageInfo(name, start, length)
    return Metadata(tensors, storage_data=storage)
