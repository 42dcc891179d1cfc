"""Memory for tensors that are read one after another: fresh pages cost more than the reading of a cached file."""

from __future__ import annotations

import sys
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_BLOCKS = 3
"""Blocks at most: for a tensor that is read, one that is written, and one between."""
LEAST_BYTES = 1 << 20
"""Smaller tensors get memory of their own."""
MAX_WASTE = 4
"""Largest ratio of a block to its tensor."""
UNUSED_REFERENCES = 3
"""References to an unused block: of the list, of the variable that looks at it, and of getrefcount's argument."""


class TensorMemory:
    """Blocks of memory that are handed out again once no tensor uses them.

    A tensor and its views refer to the block below them; a block to which the list alone refers is unused.
    """

    def __init__(self) -> None:
        self._blocks: list[Any] = []
        self._lock = Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of undefined values; its storage has exactly its size."""
        size = torch.Size(shape).numel() * dtype.itemsize
        block = self._block(size) if size >= LEAST_BYTES else None
        if block is None:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(block[:size]).view(dtype).view(shape)

    def _block(self, size: int) -> Any:
        """Return an unused block for so many bytes, if need be a new one; None if all are in use."""
        with self._lock:
            unfit = None
            for position in range(len(self._blocks)):
                block = self._blocks[position]
                if sys.getrefcount(block) > UNUSED_REFERENCES:
                    continue
                if size <= len(block) <= MAX_WASTE * size:
                    return block
                unfit = position
            block = None
            if unfit is not None:
                del self._blocks[unfit]
            elif len(self._blocks) == MAX_BLOCKS:
                return None
            self._blocks.append(np.empty(size, dtype=np.uint8))
            return self._blocks[-1]
