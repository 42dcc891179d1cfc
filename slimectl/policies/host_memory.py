"""Moves a model's tensors to host memory while engines sample on the same GPUs, and back before it is used again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class HostMemory:
    """Host copies of the storages of tensors on `devices`.

    A storage is emptied in place. Modules, optimizers and process groups keep the same tensor, view and buffer objects,
    which have their values again after `wake`.
    """

    def __init__(self, devices: Iterable[str] = ("cuda",)) -> None:
        self.devices = tuple(devices)
        self.asleep: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []
        """Emptied storages, each with its size and its copy (None for scratch)."""
        self._buffers: dict[int, torch.UntypedStorage] = {}
        """Pinned buffers, which are costly to allocate, by the storage that they belong to."""

    def sleep(self, tensors: Iterable[Tensor], *, scratch: Iterable[Tensor] = ()) -> None:
        """Move `tensors` to the host. `scratch` tensors use no memory while asleep, and return as zeros.

        Those that are already there stay there.
        """
        for keeps_values, group in ((True, tensors), (False, scratch)):
            for tensor in group:
                storage = tensor.untyped_storage()
                if tensor.device.type in self.devices and storage.nbytes():
                    size = storage.nbytes()
                    self.asleep.append((storage, size, self._copied(storage) if keeps_values else None))
                    storage.resize_(0)
        _release()

    def wake(self) -> None:
        """Move everything back."""
        while self.asleep:
            _restore(*self.asleep.pop())

    def value(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor for reading: the tensor itself, or those on the host while it is asleep."""
        storage = tensor.untyped_storage()
        copy = None if storage.nbytes() else self._buffers.get(storage._cdata)
        if copy is None:
            return tensor
        return torch.empty(0, dtype=tensor.dtype).set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Put all but scratch on the device within the block, which must only read it. Restore the state afterwards."""
        asleep = self.asleep
        self.asleep = [entry for entry in asleep if entry[2] is None]
        moved = [entry for entry in asleep if entry[2] is not None]
        for entry in moved:
            _restore(*entry)
        try:
            yield
        finally:
            for storage, _, _ in moved:
                storage.resize_(0)
            self.asleep = asleep
            if moved:
                _release()

    def _copied(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._buffers or self._buffers[key].nbytes() != size:
            buffer = torch.UntypedStorage(size)
            self._buffers[key] = buffer.pin_memory() if torch.cuda.is_available() else buffer
        return self._buffers[key].copy_(storage)


def _restore(storage: torch.UntypedStorage, size: int, copy: torch.UntypedStorage | None) -> None:
    storage.resize_(size)
    if copy is None:
        storage.fill_(0)  # type: ignore[attr-defined]
    else:
        storage.copy_(copy)


def _release() -> None:
    """Return freed memory to the GPU, because engines run in other processes."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # messages of a push that engines have closed by now
        torch.cuda.empty_cache()
