"""The KV cache of the running sequences, with one slot per sequence.

L layers · S slots · T tokens · K key-value heads · D head dimension · N rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slimectl.engines.embedded.states import SlotStates, State


class Cache:
    """Tensor [L, 2, S, K, T, D] that grows and shrinks on demand. Slots 0, 1, 2 … are the running sequences.

    The tokens of a head are contiguous, so that attention reads memory in long runs, twice as fast as token by token.
    The slots are contiguous too, and attention reads their whole token capacity. A product with a part of every slot
    would copy that part first, which takes as long as the product.

    `states` are the states of the sequences' delta nets, in the same slots, in a model that has such layers.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        states: SlotStates | None = None,
    ) -> None:
        self.states = states
        self._storage = torch.zeros(0, dtype=dtype, device=device)
        self._slab = self._storage.view(layers, 2, 0, heads, 0, head_dim)

    @property
    def slab(self) -> Tensor:
        """All keys and values [L, 2, S, K, T, D], contiguous."""
        return self._slab

    @property
    def heads(self) -> int:
        return self._slab.shape[3]

    @property
    def tokens(self) -> int:
        """Token capacity of a slot."""
        return self._slab.shape[4]

    def reserve(self, *, slots: int, tokens: int, used: int, max_slots: int, max_tokens: int) -> None:
        """Make room for `tokens` tokens in `slots` slots. The content of the first `used` slots is kept.

        The token capacity depends only on `tokens`, because it affects rounding in attention. A resumed run must get
        the same numbers as an uninterrupted one, although its cache has a different history. Slots at least double, up
        to `max_slots`.
        """
        _, _, old_slots, _, old_tokens, _ = self._slab.shape
        new_slots = old_slots if slots <= old_slots else min(max(slots, 2 * old_slots), max_slots)
        step = 16 * max(1, tokens // 64)
        new_tokens = min(-(-tokens // step) * step, -(-max_tokens // 16) * 16)
        if (new_slots, new_tokens) != (old_slots, old_tokens):
            self._resize(new_slots, new_tokens, used)
        if self.states is not None:
            self.states.reserve(new_slots, used)

    def _resize(self, slots: int, tokens: int, used: int) -> None:
        """Change the layout, in the same memory if it is large enough: new pages cost more than copies."""
        old = self._slab
        shape = (*old.shape[:2], slots, old.shape[3], tokens, old.shape[5])
        if math.prod(shape) > self._storage.numel():
            # Zeros, because masked positions are still multiplied by their zero weight and must be finite.
            self._storage = old.new_zeros(math.prod(shape))
        self._slab = self._storage[: math.prod(shape)].view(shape)
        if not used:
            return
        # The order ensures that no move overwrites keys or values that have yet to be moved.
        moves = list(zip(old.flatten(0, 1), self._slab.flatten(0, 1), strict=True))
        for source, target in reversed(moves) if self._slab.numel() > old.numel() else moves:
            region = (slice(used), slice(None), slice(min(old.shape[4], tokens)))
            target[region] = source[region].clone()

    def put(self, first: int, count: int, keys_values_L2KTD: Tensor, *, at: int) -> None:
        """Copy keys and values into `count` slots starting at `first`, as the tokens starting at `at`."""
        end = at + keys_values_L2KTD.shape[3]
        self._slab[:, :, first : first + count, :, at:end] = keys_values_L2KTD[:, :, None]

    def put_state(self, first: int, count: int, state: State | None) -> None:
        """Copy the state of delta nets, if the model has any, into `count` slots starting at `first`."""
        if self.states is not None and state is not None:
            self.states.put(first, count, state)

    def state(self, slot: int) -> State | None:
        """Return a copy of the state of a slot's delta nets, or None in a model without them."""
        return None if self.states is None else self.states.copy(slot)

    def copy(self, slot: int, start: int, end: int) -> Tensor:
        """Return a copy of the keys and values [L, 2, K, T, D] of a slot's tokens."""
        return self._slab[:, :, slot, :, start:end].clone(memory_format=torch.contiguous_format)

    def move(self, source: int, target: int, *, tokens: int) -> None:
        """Copy the first `tokens` tokens of a slot, and its state, to another slot."""
        if self.states is not None:
            self.states.move(source, target)
        self._slab[:, :, target, :, :tokens] = self._slab[:, :, source, :, :tokens]

    def rows(self, positions_N: Tensor) -> Tensor:
        """Return the indices [N, 2K] that `append` needs for tokens at `positions_N` in slots 0, 1, 2 …"""
        _, _, slots, heads, tokens, _ = self._slab.shape
        device = positions_N.device
        slot_N1 = torch.arange(positions_N.shape[0], device=device)[:, None] * (heads * tokens)
        head_K = torch.arange(heads, device=device) * tokens
        key_value_2K = torch.cat((head_K, head_K + slots * heads * tokens))
        return slot_N1 + key_value_2K + positions_N[:, None]

    def append(self, layer: int, rows: Tensor, keys_values_N2KD: Tensor) -> None:
        """Write one token's keys and values for each slot at the indices `rows`."""
        self._slab[layer].view(-1, keys_values_N2KD.shape[-1]).index_put_((rows,), keys_values_N2KD)

    def layer(self, layer: int) -> Tensor:
        """Return a contiguous view of a layer's keys and values [2, S, K, T, D]."""
        return self._slab[layer]

    def views(self, layer: int, *, slots: int) -> Tensor:
        """Return the keys and the values [2, S, K, T, D] of the first slots, each a contiguous view."""
        return self._slab[layer, :, :slots]
