"""Rotary position embeddings with every scaling that transformers implements.

N rows · D head dimension · P positions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.engines.embedded.kv_cache import Cache
from slimectl.errors import CheckpointError

BY_LENGTH = ("dynamic", "longrope")
"""Scalings whose frequencies depend on the sequence length."""


class Rope:
    """Cosines and signed sines by position; tables grow with the longest sequence seen.

    For scalings that depend on the length, a decoded token is rotated for the length that it ends, and a prompt for its
    own length, as transformers does with a single sequence.
    """

    def __init__(self, config: Any, *, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._head_dim = head_dim
        self._dtype = dtype
        self._device = device
        self._kind = config.rope_parameters.get("rope_type", "default")
        original = config.rope_parameters.get("original_max_position_embeddings")
        self._native_length = int(original or config.max_position_embeddings)
        self._cos_P1D = torch.empty(0)
        self._sin_P1D = torch.empty(0)
        self._frequencies(1)

    def rows(self, positions_N: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [N, 1, D] for tokens that each end their sequence; all positions are below `longest`."""
        if longest > self._cos_P1D.shape[0]:
            self._grow(max(longest, 2 * self._cos_P1D.shape[0], 256))
        return self._cos_P1D[positions_N], self._sin_P1D[positions_N]

    def prompt_rows(self, positions_N: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Return cos and sin [N, 1, D] for whole prompts, concatenated."""
        cos_N1D, sin_N1D = self.rows(positions_N, max(lengths))
        if self._kind in BY_LENGTH:
            start = 0
            for length in lengths:
                if length > self._native_length:
                    cos, sin = self._table(torch.arange(length), *self._frequencies(length))
                    cos_N1D[start : start + length], sin_N1D[start : start + length] = cos, sin
                start += length
        return cos_N1D, sin_N1D

    def _grow(self, size: int) -> None:
        positions_P = torch.arange(size)
        if self._kind not in BY_LENGTH or size <= self._native_length:
            self._cos_P1D, self._sin_P1D = self._table(positions_P, *self._frequencies(min(size, self._native_length)))
            return
        native_P = positions_P[: self._native_length]
        pieces = [self._table(native_P, *self._frequencies(self._native_length))]
        for position in range(self._native_length, size):
            pieces.append(self._table(positions_P[position : position + 1], *self._frequencies(position + 1)))
        self._cos_P1D, self._sin_P1D = (torch.cat(tables) for tables in zip(*pieces, strict=True))

    def _table(self, positions_P: Tensor, inverse_D2: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        angles_PD2 = positions_P.float()[:, None] * inverse_D2
        cos_PD2, sin_PD2 = angles_PD2.cos() * scale, angles_PD2.sin() * scale
        # x * cos + roll(x, D/2) * sin is the rotation when the first half of the sines carries the minus.
        cos_PD, sin_PD = torch.cat((cos_PD2, cos_PD2), -1), torch.cat((-sin_PD2, sin_PD2), -1)
        return (
            cos_PD[:, None].to(self._device, self._dtype),
            sin_PD[:, None].to(self._device, self._dtype),
        )

    def _frequencies(self, length: int) -> tuple[Tensor, float]:
        """Return inverse frequencies [D/2] and the factor on cos and sin, for a sequence of this length."""
        if self._kind == "default":
            exponents_D2 = torch.arange(0, self._head_dim, 2, dtype=torch.int64).float() / self._head_dim
            return 1.0 / (self._config.rope_parameters["rope_theta"] ** exponents_D2), 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if self._kind not in ROPE_INIT_FUNCTIONS:
            types = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
            raise CheckpointError(f"config.json: rope_type {self._kind!r} is not known; known are {types}")
        inverse_D2, scale = ROPE_INIT_FUNCTIONS[self._kind](self._config, torch.device("cpu"), seq_len=length)
        return inverse_D2.float(), float(scale)


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
