"""Keys and values of the running sequences, one slot each.

L layers · S slots · T tokens · K key-value heads · D head dimension · N rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Cache:
    """A slab [L, S, T, 2, K, D] that grows with what is asked of it; slots 0, 1, 2 … are the running sequences."""

    def __init__(self, layers: int, heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._slab = torch.zeros(layers, 0, 0, 2, heads, head_dim, dtype=dtype, device=device)

    @property
    def tokens(self) -> int:
        """Tokens that a slot holds."""
        return self._slab.shape[2]

    def reserve(self, *, slots: int, tokens: int, max_slots: int, max_tokens: int) -> None:
        """Make room, at least doubling what is too small, within the limits."""
        old_slots, old_tokens = self._slab.shape[1:3]
        if slots <= old_slots and tokens <= old_tokens:
            return
        if slots > old_slots:
            slots = min(max(slots, 2 * old_slots), max_slots)
        if tokens > old_tokens:
            tokens = min(max(-(-tokens // 64) * 64, 2 * old_tokens), -(-max_tokens // 16) * 16)
        # Zeros: what the attention mask hides is still multiplied by its zero weight, and must be finite.
        grown = self._slab.new_zeros(
            self._slab.shape[0], max(slots, old_slots), max(tokens, old_tokens), *self._slab.shape[3:]
        )
        grown[:, :old_slots, :old_tokens] = self._slab
        self._slab = grown

    def put(self, first: int, count: int, prompt_LT: Tensor) -> None:
        """Copy a prompt's keys and values [L, T, 2, K, D] into `count` slots from `first` on."""
        self._slab[:, first : first + count, : prompt_LT.shape[1]] = prompt_LT[:, None]

    def move(self, sources: list[int], targets: list[int], *, tokens: int) -> None:
        """Copy whole slots onto others, their first `tokens` tokens."""
        if sources:
            self._slab[:, targets, :tokens] = self._slab[:, sources, :tokens]

    def append(self, layer: int, rows_N: Tensor, keys_values: Tensor) -> None:
        """Write one token's keys and values [N, 2, K, D] at each of `rows_N` (slot times tokens plus position)."""
        self._slab[layer].flatten(0, 1).index_copy_(0, rows_N, keys_values)

    def views(self, layer: int, *, slots: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, K, T, D] of the first slots and tokens, not copied."""
        keys_values = self._slab[layer, :slots, :tokens]
        return keys_values[:, :, 0].transpose(1, 2), keys_values[:, :, 1].transpose(1, 2)
