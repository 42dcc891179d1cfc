"""Attention of a step: prefill of whole prompts, and decoding of one token per sequence.

N rows · B sequences · H query heads · K key-value heads · G query heads a key-value head · D head dimension ·
T tokens · L layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.engines.embedded.cache import Cache

FEW = 16
"""Key-value heads times rows from which batched products beat the fused kernel, which works head by head."""


class Decode:
    """Attention of one new token for each of the first B slots of the cache."""

    def __init__(self, cache: Cache, positions_B: Tensor, longest: int, *, heads: int, dtype: torch.dtype) -> None:
        self._cache = cache
        self._heads = heads
        self._slots = positions_B.shape[0]
        self._tokens = min(-(-longest // 16) * 16, cache.tokens)
        self._rows = cache.rows(positions_B)
        device = positions_B.device
        hidden_BT = torch.arange(self._tokens, device=device) > positions_B[:, None]
        # Additive and of the dtype of the scores: a boolean mask is converted again in every layer.
        mask_BT = torch.zeros(hidden_BT.shape, dtype=dtype, device=device).masked_fill_(hidden_BT, float("-inf"))
        self._fused = device.type != "cpu" or self._slots * cache.heads < FEW
        if self._fused:
            self._mask = mask_BT[:, None, None].expand(-1, -1, heads // cache.heads, -1)
        else:
            self._mask = mask_BT.repeat_interleave(cache.heads, 0)[:, None]

    def __call__(self, layer: int, qkv_NHD: Tensor) -> Tensor:
        """Return attention output [N, H * D]. The query heads of a key-value head are passed as a sequence."""
        rows, all_heads, head_dim = qkv_NHD.shape
        heads = self._heads
        kv_heads = (all_heads - heads) // 2
        group = heads // kv_heads
        self._cache.append(layer, self._rows, qkv_NHD[:, heads:])
        keys, values = self._cache.views(layer, slots=self._slots, tokens=self._tokens)
        query_BKGD = qkv_NHD[:, :heads].view(rows, kv_heads, group, head_dim)
        if self._fused:
            out_BKGD = F.scaled_dot_product_attention(query_BKGD, keys, values, attn_mask=self._mask)
            return out_BKGD.reshape(rows, heads * head_dim)
        scores = torch.baddbmm(
            self._mask,
            query_BKGD.reshape(rows * kv_heads, group, head_dim),
            keys.flatten(0, 1).transpose(1, 2),
            alpha=head_dim**-0.5,
        )
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(rows, heads * head_dim)


class Prefill:
    """Attention of whole prompts, concatenated; stores their keys and values in `keys_values` [L, N, 2, K, D]."""

    def __init__(self, lengths: list[int], *, layers: int, heads: int, device: torch.device) -> None:
        self._layers = layers
        self._heads = heads
        self._shape = (len(lengths), max(lengths))
        self.keys_values = torch.empty(0)
        lengths_B = torch.tensor(lengths)
        starts_B = lengths_B.cumsum(0) - lengths_B
        columns_T = torch.arange(max(lengths))
        present_BT = columns_T < lengths_B[:, None]
        self.positions_N = columns_T.expand(self._shape)[present_BT].to(device)
        self.last_B = (starts_B + lengths_B - 1).to(device)
        even = min(lengths) == max(lengths)
        # Padding repeats a prompt's last token: behind every real one, so that a causal mask hides it.
        padded_BT = starts_B[:, None] + torch.minimum(columns_T, lengths_B[:, None] - 1)
        self._padded = None if even else padded_BT.flatten().to(device)
        self._present = None if even else present_BT.flatten().nonzero().squeeze(1).to(device)

    def __call__(self, layer: int, qkv_NHD: Tensor) -> Tensor:
        """Return attention output [N, H * D]."""
        rows, all_heads, head_dim = qkv_NHD.shape
        heads = self._heads
        kv_heads = (all_heads - heads) // 2
        if layer == 0:
            self.keys_values = qkv_NHD.new_empty(self._layers, rows, 2, kv_heads, head_dim)
        self.keys_values[layer] = qkv_NHD[:, heads:].view(rows, 2, kv_heads, head_dim)
        padded = qkv_NHD if self._padded is None else qkv_NHD.index_select(0, self._padded)
        padded_BHTD = padded.view(*self._shape, all_heads, head_dim).transpose(1, 2)
        query, key, value = torch.split(padded_BHTD, [heads, kv_heads, kv_heads], 1)
        out_BHTD = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != kv_heads)
        out_NE = out_BHTD.transpose(1, 2).reshape(-1, heads * head_dim)
        return out_NE if self._present is None else out_NE.index_select(0, self._present)
