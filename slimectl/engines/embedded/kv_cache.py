"""KV cache of the running sequences, one slot each.

L layers · S slots · T tokens · K key-value heads · D head dimension · N rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Cache:
    """Tensor [L, 2, S, K, T, D] that grows on demand; slots 0, 1, 2 … are the running sequences.

    The tokens of a head are contiguous: attention reads memory in long runs, twice as fast as token by token.
    """

    def __init__(self, layers: int, heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._slab = torch.zeros(layers, 2, 0, heads, 0, head_dim, dtype=dtype, device=device)

    @property
    def heads(self) -> int:
        return self._slab.shape[3]

    @property
    def tokens(self) -> int:
        """Token capacity of a slot."""
        return self._slab.shape[4]

    def reserve(self, *, slots: int, tokens: int, max_slots: int, max_tokens: int) -> None:
        """Grow to the requested slots and tokens, at least doubling what is too small, within the limits."""
        layers, _, old_slots, heads, old_tokens, head_dim = self._slab.shape
        if slots <= old_slots and tokens <= old_tokens:
            return
        if slots > old_slots:
            slots = min(max(slots, 2 * old_slots), max_slots)
        if tokens > old_tokens:
            tokens = min(max(-(-tokens // 64) * 64, 2 * old_tokens), -(-max_tokens // 16) * 16)
        slots, tokens = max(slots, old_slots), max(tokens, old_tokens)
        # Zeros: masked positions are still multiplied by their zero weight, and must be finite.
        grown = self._slab.new_zeros(layers, 2, slots, heads, tokens, head_dim)
        grown[:, :, :old_slots, :, :old_tokens] = self._slab
        self._slab = grown

    def put(self, first: int, count: int, keys_values_L2KTD: Tensor, *, at: int) -> None:
        """Copy keys and values into `count` slots from `first` on, as the tokens from `at` on."""
        end = at + keys_values_L2KTD.shape[3]
        self._slab[:, :, first : first + count, :, at:end] = keys_values_L2KTD[:, :, None]

    def copy(self, slot: int, start: int, end: int) -> Tensor:
        """Return a copy of the keys and values [L, 2, K, T, D] of a slot's tokens."""
        return self._slab[:, :, slot, :, start:end].clone(memory_format=torch.contiguous_format)

    def move(self, source: int, target: int, *, tokens: int) -> None:
        """Copy a slot onto another one, its first `tokens` tokens."""
        self._slab[:, :, target, :, :tokens] = self._slab[:, :, source, :, :tokens]

    def rows(self, positions_N: Tensor) -> Tensor:
        """Return the indices [N, 2K] for `append` of tokens at `positions_N` in slots 0, 1, 2 …"""
        _, _, slots, heads, tokens, _ = self._slab.shape
        device = positions_N.device
        slot_N1 = torch.arange(positions_N.shape[0], device=device)[:, None] * (heads * tokens)
        head_K = torch.arange(heads, device=device) * tokens
        key_value_2K = torch.cat((head_K, head_K + slots * heads * tokens))
        return slot_N1 + key_value_2K + positions_N[:, None]

    def append(self, layer: int, rows: Tensor, keys_values_N2KD: Tensor) -> None:
        """Write one token's keys and values for each slot at the indices `rows`."""
        self._slab[layer].view(-1, keys_values_N2KD.shape[-1]).index_put_((rows,), keys_values_N2KD)

    def views(self, layer: int, *, slots: int, tokens: int) -> Tensor:
        """Return views of keys, then values [2, S, K, T, D] of the first slots and tokens."""
        return self._slab[layer, :, :slots, :, :tokens]
