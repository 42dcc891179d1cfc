"""States of delta nets: of one sequence, and of the running sequences by slot.

L delta nets · B slots · W channels of the convolution · S its taps · H value heads · K key width · V value width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slimectl.architectures.qwen_next import Sizes


class State(NamedTuple):
    """What the delta nets remember of a sequence: the last inputs of the convolutions, and float32 memories.

    `inputs_LSW` has one tap less than the convolutions. `memory_LHKV` is the S_t of `gated_delta_rule`.
    """

    inputs_LSW: Tensor
    memory_LHKV: Tensor

    @property
    def nbytes(self) -> int:
        return self.inputs_LSW.nbytes + self.memory_LHKV.nbytes


class SlotStates:
    """States of the running sequences, by slot: inputs [L, B, S - 1, W] and memories [L, B, H, K, V]."""

    def __init__(self, layers: int, sizes: Sizes, taps: int, *, dtype: torch.dtype, device: torch.device) -> None:
        inputs = (layers, 0, taps - 1, sum(sizes.blocks[:3]))
        memory = (layers, 0, sizes.value_heads, sizes.key_dim, sizes.value_dim)
        self.inputs = torch.zeros(inputs, dtype=dtype, device=device)
        self.memory = torch.zeros(memory, dtype=torch.float32, device=device)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the state in one slot."""
        shapes = ((part.shape[0], *part.shape[2:], part.itemsize) for part in (self.inputs, self.memory))
        return sum(map(math.prod, shapes))

    def reserve(self, slots: int, used: int) -> None:
        """Make room for `slots` slots. The content of the first `used` slots is kept."""
        if slots != self.inputs.shape[1]:
            self.inputs, self.memory = (_resized(part, slots, used) for part in (self.inputs, self.memory))

    def put(self, first: int, count: int, state: State) -> None:
        """Copy a state into `count` slots starting at `first`."""
        self.inputs[:, first : first + count] = state.inputs_LSW[:, None]
        self.memory[:, first : first + count] = state.memory_LHKV[:, None]

    def copy(self, slot: int) -> State:
        """Return a copy of the state in a slot."""
        return State(self.inputs[:, slot].clone(), self.memory[:, slot].clone())

    def move(self, source: int, target: int) -> None:
        self.inputs[:, target], self.memory[:, target] = self.inputs[:, source], self.memory[:, source]


def _resized(part: Tensor, slots: int, used: int) -> Tensor:
    new = part.new_zeros(part.shape[0], slots, *part.shape[2:])
    new[:, :used] = part[:, :used]
    return new
