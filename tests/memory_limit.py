"""A limit of memory on a machine without a GPU: counts live bytes by operation, forward and backward."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryLimit(TorchDispatchMode):
    """Raises torch.OutOfMemoryError at the operation of this thread after which results need more than `limit` bytes.

    Tensors from before it was entered do not count. `faults` are the names of the operations that failed, in order, and
    `in_backward` whether autograd ran each of them.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit, self.live, self.peak = limit, 0, 0
        self.faults: list[str] = []
        self.in_backward: list[bool] = []
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage in self._counted or storage._cdata in given:
                continue
            size = storage.nbytes()
            if self.live + size > self.limit:
                self.faults.append(func._schema.name)
                self.in_backward.append(torch._C._current_graph_task_id() != -1)
                raise torch.OutOfMemoryError(f"{size} bytes, of {self.limit - self.live} free (a limit of the test)")
            self._counted.add(storage)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, size)
        return result

    def _free(self, size: int) -> None:
        self.live -= size


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
