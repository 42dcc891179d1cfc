"""Messages of weights for servers of this machine: buckets of bounded size, and one block of shared memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slimectl.errors import CheckpointError, StorageError
from slimectl.protocols import NamedTensors

if TYPE_CHECKING:
    from torch import Tensor, dtype


NamedTensor = tuple[str, Tensor]
SHARED = "/dev/shm"


def aligned(tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
    """Sort tensors by element width, widest first, so that each begins at a multiple of its width when concatenated."""
    return sorted(tensors, key=lambda named: -named[1].element_size())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class SharedMemoryBlock:
    """Shared memory that successive messages reuse: to touch pages for the first time costs more than to fill them.

    Released with this object. Raises StorageError if there is no room for it.
    """

    def __init__(self, size: int) -> None:
        _check_room(size)
        self.size = size
        self._memory = SharedMemory(create=True, size=max(1, size))
        self.free = weakref.finalize(self, _release, self._memory)

    def hold(self, tensors: Sequence[NamedTensor]) -> dict[str, Any]:
        """Write tensors into the block; returns its name and a table of [name, dtype, shape, offset]."""
        places, end = [], 0
        for name, tensor in aligned(tensors):
            start, end = end, end + tensor.nbytes
            places.append([name, dtype_name(tensor.dtype), list(tensor.shape), start])
            if tensor.numel():
                target = torch.frombuffer(self._memory.buf, dtype=tensor.dtype, count=tensor.numel(), offset=start)
                target.copy_(tensor.detach().reshape(-1))
                del target  # a block cannot be closed while a view of it exists
        return {"name": self._memory.name, "tensors": places}


def _release(memory: SharedMemory) -> None:
    memory.close()
    memory.unlink()


def _check_room(size: int) -> None:
    """Check the free space of /dev/shm: beyond it a write kills the process by SIGBUS; containers often have 64 MiB."""
    if os.path.isdir(SHARED):
        status = os.statvfs(SHARED)
        free = status.f_bavail * status.f_frsize
        if free < size:
            raise StorageError(
                f"{SHARED}: {free / 2**20:.0f} MiB are free, a message of weights takes {size / 2**20:.0f}; give the"
                " container more shared memory, or lower sync.update_weight_buffer_size"
            )


Forms = Mapping[str, "tuple[tuple[int, ...], dtype]"]


def buckets(
    tensors: NamedTensors, forms: Forms, *, bucket_bytes: int
) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Yield buckets of about `bucket_bytes`, and whether it is the last; `forms` has the names and shapes of the model.

    Raises CheckpointError on an extra, misshapen or missing tensor, before the last bucket is yielded.
    """
    missing = set(forms)
    bucket: list[tuple[str, Tensor]] = []
    bucket_size = 0
    for name, tensor in tensors:
        if name not in forms:
            raise CheckpointError(f"weights: {name} is not part of this model")
        shape = tuple(forms[name][0])
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"weights: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if bucket_size >= bucket_bytes:
            yield bucket, False
            bucket, bucket_size = [], 0
        missing.discard(name)
        bucket.append((name, tensor))
        bucket_size += tensor.numel() * tensor.element_size()
    if missing:
        raise CheckpointError(f"weights: {min(missing)} is missing ({len(missing)} in all)")
    if bucket:
        yield bucket, True
