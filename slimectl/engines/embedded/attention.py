"""Rotary position embeddings with every scaling that transformers implements, and attention over the cache.

N rows · D head dimension · P positions · B sequences · K key-value heads · G query heads per key-value head · T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.architectures.family import Tower
from slimectl.engines.embedded.kv_cache import Cache
from slimectl.engines.embedded.native import Kernels, SpanTable
from slimectl.engines.embedded.prefix_tree import CachedSpan
from slimectl.errors import CheckpointError

BY_LENGTH = ("dynamic", "longrope")
"""Scalings whose frequencies depend on the sequence length."""


def axes(sections: Sequence[int], *, alternate: bool) -> Tensor:
    """Return the axis [D] whose position rotates each dimension of a head: 0 time, 1 height, 2 width.

    >>> axes([2, 1, 1], alternate=False).tolist()
    [0, 0, 1, 2, 0, 0, 1, 2]
    >>> axes([2, 1, 1], alternate=True).tolist()
    [0, 1, 2, 0, 0, 1, 2, 0]
    """
    if not alternate:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(sections)).repeat(2)
    axis_D2 = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axis_D2[axis : 3 * sections[axis] : 3] = axis
    return axis_D2.repeat(2)


class Rope:
    """Cosines and signed sines by position. The tables grow with the longest sequence seen.

    D, `width`, counts the dimensions of a head that rotate.

    Some scalings depend on the sequence length. A decoded token is then rotated for the length up to and including it,
    and a prompt for its own length. transformers does the same for a single sequence.
    """

    def __init__(
        self, config: Any, tower: Tower | None, *, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._width = width
        self._dtype = dtype
        self._device = device
        self._kind = config.rope_parameters.get("rope_type", "default")
        original = config.rope_parameters.get("original_max_position_embeddings")
        self._native_length = int(original or config.max_position_embeddings)
        self._cos_P1D = torch.empty(0)
        self._sin_P1D = torch.empty(0)
        self._frequencies(1)
        sections = () if tower is None else config.rope_parameters.get("mrope_section") or tower.rope_sections
        if sections and (self._kind != "default" or 2 * sum(sections) != width):
            raise CheckpointError(
                f"config.json: mrope_section {list(sections)} with rope_type {self._kind!r} and heads of {width}:"
                " the embedded engine needs rope_type default and sections that sum to half the head dimension"
            )
        self._axis_D = axes(sections, alternate=tower is not None and tower.alternates_sections) if sections else None

    @property
    def reusable_tokens(self) -> float:
        """Number of leading tokens whose keys do not depend on the length of their prompt."""
        return self._native_length if self._kind in BY_LENGTH else math.inf

    def rows(self, positions_N: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [N, 1, D] for the last token of each sequence. All positions are below `longest`."""
        if longest > self._cos_P1D.shape[0]:
            self._grow(max(longest, 2 * self._cos_P1D.shape[0], 256))
        return self._cos_P1D[positions_N], self._sin_P1D[positions_N]

    def section_rows(self, positions_3N: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [N, 1, D] for positions along time, height and width."""
        axis_D = self._axis_D
        assert axis_D is not None
        rows = (table_3N1D.permute(3, 0, 1, 2) for table_3N1D in self.rows(positions_3N, longest))
        cos, sin = (part[torch.arange(len(axis_D)), axis_D].permute(1, 2, 0).contiguous() for part in rows)
        return cos, sin

    def prompt_rows(self, positions_N: Tensor, lengths: list[int], longest: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [N, 1, D] for concatenated prompts, each without at most its first `reusable_tokens`."""
        cos_N1D, sin_N1D = self.rows(positions_N, longest)
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
        # x * cos + roll(x, D/2) * sin is the rotation if the first half of the sines is negated.
        cos_PD, sin_PD = torch.cat((cos_PD2, cos_PD2), -1), torch.cat((-sin_PD2, sin_PD2), -1)
        return (
            cos_PD[:, None].to(self._device, self._dtype),
            sin_PD[:, None].to(self._device, self._dtype),
        )

    def _frequencies(self, length: int) -> tuple[Tensor, float]:
        """Return inverse frequencies [D/2] and the factor on cos and sin, for a sequence of this length."""
        if self._kind == "default":
            exponents_D2 = torch.arange(0, self._width, 2, dtype=torch.int64).float() / self._width
            return 1.0 / (self._config.rope_parameters["rope_theta"] ** exponents_D2), 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if self._kind not in ROPE_INIT_FUNCTIONS:
            types = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
            raise CheckpointError(f"config.json: rope_type {self._kind!r} is not supported. Supported types: {types}")
        inverse_D2, scale = ROPE_INIT_FUNCTIONS[self._kind](self._config, torch.device("cpu"), seq_len=length)
        return inverse_D2.float(), float(scale)


DENSE_SCORES = 2**24
"""Maximum number of attention scores in memory at once: 32 MiB in bfloat16."""

FEW = 16
"""Minimum of key-value heads times rows at which batched products beat the fused kernel, which works head by head."""


class Decode:
    """Attention of one new token for each of the first B slots of the cache.

    A sequence first reads tokens from `spans`, and then from its own slot. `positions_B` are positions in the slot. If
    `kernels` are given, they do the computation.
    """

    def __init__(
        self,
        cache: Cache,
        positions_B: Tensor,
        *,
        heads: int,
        dtype: torch.dtype,
        spans: Sequence[CachedSpan] = (),
        kernels: Kernels | None = None,
    ) -> None:
        self._cache = cache
        self._heads = heads
        self._slots = positions_B.shape[0]
        self._tokens = cache.tokens
        self._spans = spans
        self._kernels = kernels
        if self._kernels is not None:
            self._positions_B, self._shared = positions_B, SpanTable(spans, self._slots)
            self._scratch = self._kernels.attention_scratch(cache.layer(0), heads, self._shared)
            return
        self._rows = cache.rows(positions_B)
        device = positions_B.device
        hidden_BT = torch.arange(self._tokens, device=device) > positions_B[:, None]
        # Additive and in the dtype of the scores, because a boolean mask would be converted again in every layer.
        mask_BT = torch.zeros(hidden_BT.shape, dtype=dtype, device=device).masked_fill_(hidden_BT, float("-inf"))
        self._fused = not spans and (device.type != "cpu" or self._slots * cache.heads < FEW)
        if self._fused:
            self._mask = mask_BT[:, None, None].expand(-1, -1, heads // cache.heads, -1)
        else:
            self._mask = mask_BT.repeat_interleave(cache.heads, 0)[:, None]
        if spans:
            self._shared_tokens = max(span.end for span in spans)
            shape = (self._slots, cache.heads, heads // cache.heads, self._shared_tokens + self._tokens)
            # Rows that do not read a span keep a score of minus infinity for its tokens in every layer.
            self._scores_BKGT = torch.full(shape, float("-inf"), dtype=dtype, device=device)

    def __call__(self, layer: int, qkv_NHD: Tensor) -> Tensor:
        """Return attention output [N, H * D]. The query heads of a key-value head are passed as a sequence."""
        if self._kernels is not None:
            slots = self._cache.layer(layer)
            return self._kernels.attend(layer, qkv_NHD, slots, self._positions_B, self._shared, self._scratch)
        rows, all_heads, head_dim = qkv_NHD.shape
        heads = self._heads
        kv_heads = (all_heads - heads) // 2
        group = heads // kv_heads
        self._cache.append(layer, self._rows, qkv_NHD[:, heads:])
        keys, values = self._cache.views(layer, slots=self._slots)
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
        if self._spans:
            return self._with_spans(layer, query_BKGD, scores, values)
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(rows, heads * head_dim)

    def _with_spans(self, layer: int, query_BKGD: Tensor, scores: Tensor, values: Tensor) -> Tensor:
        """Attend to spans and slots in one softmax. Each span takes one product for all its rows."""
        rows, kv_heads, group, head_dim = query_BKGD.shape
        for span in self._spans:
            query = query_BKGD[span.rows].transpose(0, 1).flatten(1, 2)
            products = torch.bmm(query, span.keys_values[layer, 0].transpose(1, 2)).mul_(head_dim**-0.5)
            products_NKGT = products.view(kv_heads, -1, group, span.end - span.start).transpose(0, 1)
            self._scores_BKGT[span.rows, :, :, span.start : span.end] = products_NKGT
        self._scores_BKGT[..., self._shared_tokens :] = scores.view(rows, kv_heads, group, -1)
        weights_BKGT = self._scores_BKGT.softmax(-1)
        slot_weights = weights_BKGT[..., self._shared_tokens :].flatten(0, 1)
        out_BKGD = torch.bmm(slot_weights, values.flatten(0, 1)).view(query_BKGD.shape)
        for span in self._spans:
            weights = weights_BKGT[span.rows, :, :, span.start : span.end].transpose(0, 1).flatten(1, 2)
            sums = torch.bmm(weights, span.keys_values[layer, 1])
            out_BKGD[span.rows] += sums.view(kv_heads, -1, group, head_dim).transpose(0, 1)
        return out_BKGD.view(rows, -1)


class Prefill:
    """Attention of concatenated prompts. Stores their keys and values in `keys_values` [L, N, 2, K, D].

    `lengths` counts the tokens to compute for each prompt. `prefixes` holds the keys and values [L, 2, K, T, D] of the
    tokens before them, in any number of parts.
    """

    def __init__(
        self, lengths: list[int], *, layers: int, heads: int, device: torch.device, prefixes: Sequence[Sequence[Tensor]]
    ) -> None:
        self._layers = layers
        self._heads = heads
        self._shape = (len(lengths), max(lengths))
        self.keys_values = torch.empty(0)
        lengths_B = torch.tensor(lengths)
        offsets = [sum(part.shape[3] for part in prefix) for prefix in prefixes]
        ends = list(accumulate(lengths))
        starts_B = lengths_B.cumsum(0) - lengths_B
        columns_T = torch.arange(max(lengths))
        present_BT = columns_T < lengths_B[:, None]
        positions_BT = columns_T + torch.tensor(offsets)[:, None]
        self.positions_N = positions_BT[present_BT].to(device)
        self.longest = max(map(sum, zip(lengths, offsets, strict=True)))
        self.last_B = (starts_B + lengths_B - 1).to(device)
        self._prefixes = [
            (slice(end - length, end), prefix)
            for length, end, prefix in zip(lengths, ends, prefixes, strict=True)
            if prefix
        ]
        even = min(lengths) == max(lengths)
        # Padding repeats a prompt's last token. It comes after every real token, so the causal mask hides it.
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
        if self._prefixes:
            return self._with_prefixes(layer, qkv_NHD, query, key, value)
        return self._unpadded(_causal_attention(query, key, value)).flatten(1)

    def _unpadded(self, padded_BHTX: Tensor) -> Tensor:
        rows_NHX = padded_BHTX.transpose(1, 2).flatten(0, 1)
        return rows_NHX if self._present is None else rows_NHX.index_select(0, self._present)

    def _with_prefixes(self, layer: int, qkv_NHD: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to the new tokens and to their prefixes, and merge the two by log-sum-exp."""
        heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
        group = heads // kv_heads
        out, lse = _attention(query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), causal=True)
        out_NHD, lse_NH = self._unpadded(out), self._unpadded(lse[..., None])[..., 0]
        for rows, prefix in self._prefixes:
            keys_values = prefix[0][layer] if len(prefix) == 1 else torch.cat([part[layer] for part in prefix], 2)
            query_KRD = qkv_NHD[rows, :heads].view(-1, kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
            out, lse = _attention(query_KRD[None], keys_values[:1], keys_values[1:], causal=False)
            before_NHD = out.view(kv_heads, -1, group, head_dim).transpose(0, 1).flatten(1, 2)
            before_NH = lse.view(kv_heads, -1, group).transpose(0, 1).flatten(1)
            share_NH1 = torch.sigmoid(before_NH - lse_NH[rows])[..., None]
            out_NHD[rows] = torch.lerp(out_NHD[rows], before_NHD, share_NH1.to(before_NHD.dtype))
        return out_NHD.flatten(1)


def _causal_attention(query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor) -> Tensor:
    """Return causal attention [B, H, T, D].

    In bfloat16 on a CPU, uses plain products if all scores fit in memory. torch's (2.13) fused kernel takes three to
    nine times as long.
    """
    batch, heads, tokens, head_dim = query_BHTD.shape
    kv_heads = key_BKTD.shape[1]
    if _lacks_bfloat16(query_BHTD):
        wide = _causal_attention(query_BHTD.float(), key_BKTD.float(), value_BKTD.float())
        return wide.to(query_BHTD.dtype)
    is_slow = query_BHTD.device.type == "cpu" and query_BHTD.dtype == torch.bfloat16
    if not is_slow or batch * heads * tokens * tokens > DENSE_SCORES:
        gqa = heads != kv_heads
        return F.scaled_dot_product_attention(query_BHTD, key_BKTD, value_BKTD, is_causal=True, enable_gqa=gqa)
    rows_XRD = (query_BHTD * head_dim**-0.5).reshape(batch * kv_heads, -1, head_dim)
    scores = torch.bmm(rows_XRD, key_BKTD.reshape(batch * kv_heads, tokens, head_dim).transpose(1, 2))
    scores.view(batch, heads, tokens, tokens).add_(scores.new_full((tokens, tokens), float("-inf")).triu_(1))
    sums = torch.bmm(scores.softmax(-1), value_BKTD.reshape(batch * kv_heads, tokens, head_dim))
    return sums.view(batch, heads, tokens, head_dim)


def _lacks_bfloat16(tensor: Tensor) -> bool:
    """Whether a tensor is in bfloat16 on a CPU that multiplies float32 up to a hundred times faster."""
    is_cpu = tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"
    return is_cpu and torch.backends.cpu.get_cpu_capability() == "AVX2"


def _attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention output [B, H, T, D] and the log-sum-exp [B, H, T] of its scores."""
    if _lacks_bfloat16(query):
        out, lse = _attention(query.float(), key.float(), value.float(), causal=causal)
        return out.to(query.dtype), lse
    if query.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(query, key, value, 0.0, causal)
    else:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, *_ = efficient(query, key, value, None, True, 0.0, causal)
    return out, lse[..., : query.shape[2]]
