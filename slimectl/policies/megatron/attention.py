"""Causal attention over packed sequences, with context parallelism; grouped-query attention around it.

T tokens of this rank · S tokens of the row · H query heads · K key-value heads · D head dimension (of values
V) · B sequences of one call · L their length. TransformerEngine's attention is not used, even where it is installed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from slimectl.policies.megatron.batch import PackedSequences
from slimectl.policies.megatron.rotary import rotated

DENSE_SCORES = 2**26
"""Largest number of attention scores of a call in memory (128 MiB in bfloat16); above it, flash attention."""


class PackedCoreAttention(nn.Module):
    """mcore's core attention for packed sequences.

    That of mcore (0.16.1, without TransformerEngine) supports neither packing nor context parallelism nor heads whose
    values are narrower than their keys.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.group = pg_collection.cp

    def forward(self, query_THD: Tensor, key_TKD: Tensor, value_TKV: Tensor, packed: PackedSequences) -> Tensor:
        """Attention output, heads side by side: [T, H·V]."""
        if packed.context > 1:
            # All keys and values are gathered: 2·K·D numbers per token, little beside the work on the queries.
            key_TKD, value_TKV = (
                gather_from_sequence_parallel_region(states.contiguous(), group=self.group)[packed.order_S]
                for states in (key_TKD, value_TKV)
            )
        if _supports_flash(query_THD):
            return _varlen(query_THD, key_TKD, value_TKV, packed, self.scale).flatten(1)
        return torch.cat([
            _causal(query_THD[q], key_TKD[k], value_TKV[k], count, self.scale) for q, k, count in _calls(packed)
        ])  # fmt: skip


class PackedSelfAttention(SelfAttention):
    """mcore's grouped-query attention with our rotary embedding and core attention; same parameters."""

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: PackedSequences, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map [T, 1, hidden] to the same shape; returns the bias to add too."""
        gated = self.config.attention_output_gate
        query, key, value, *gate = (
            states.squeeze(1) for states in self.get_query_key_value_tensors(hidden_states, output_gate=gated)
        )
        assert packed_seq_params.angles is not None
        query, key = rotated(query, packed_seq_params.angles), rotated(key, packed_seq_params.angles)
        output_TW = recomputable(self, query, key, value, packed_seq_params)
        if gate:
            output_TW = output_TW * torch.sigmoid(gate[0].flatten(1))
        return self.linear_proj(output_TW[:, None])


def recomputable(layer: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
    """The layer's core attention, recomputed in the backward pass if its configuration says so."""
    if not (layer.checkpoint_core_attention and layer.training):
        return layer.core_attention(query, key, value, packed)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return layer.core_attention(query, key, value, packed)

    return tensor_parallel.checkpoint(attend, False, query, key, value)


def _calls(packed: PackedSequences) -> Iterator[tuple[slice, slice, int]]:
    """Yield (rows of queries, rows of keys, sequences) of every call: neighbours of equal length share one.

    Under context parallelism a call is one chunk of a sequence, and its keys are all up to the chunk's end.
    """
    if packed.context == 1:
        start = 0
        for length, run in itertools.groupby(packed.lengths):
            count = len(list(run))
            rows = slice(start, start + count * length)
            yield rows, rows, count
            start = rows.stop
        return
    offset = 0
    for length, start in zip(packed.lengths, packed.starts, strict=True):
        chunk = length // (2 * packed.context)
        for part in (packed.rank, 2 * packed.context - 1 - packed.rank):
            yield slice(offset, offset + chunk), slice(start, start + (part + 1) * chunk), 1
            offset += chunk


def _causal(query: Tensor, key: Tensor, value: Tensor, count: int, scale: float | None) -> Tensor:
    """`count` sequences of one length; queries are at the last of the keys' positions. Returns [B·L, H·V]."""
    q, k, v = (states.unflatten(0, (count, -1)).transpose(1, 2) for states in (query, key, value))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if _prefers_dense(q, k):
        output_BHLV = _dense(q, k, v, scale)
    else:
        causal: dict[str, Any] = {"is_causal": True}
        if q.shape[2] != k.shape[2]:
            causal = {"attn_mask": causal_lower_right(q.shape[2], k.shape[2])}
        gqa = q.shape[1] != k.shape[1]
        output_BHLV = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=gqa, **causal)
    return output_BHLV.transpose(1, 2).flatten(2).flatten(0, 1)


def _prefers_dense(query: Tensor, key: Tensor) -> bool:
    """torch 2.13's bfloat16 flash attention on CPU takes three to nine times as long as two matrix products."""
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and scores <= DENSE_SCORES


def _dense(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention with its scores in memory; query heads of one key head are rows of one product."""
    count, heads, length, width = query.shape
    groups = heads // key.shape[1]
    mask = torch.full((length, key.shape[2]), -torch.inf, dtype=query.dtype, device=query.device)
    mask = mask.triu_(1 + key.shape[2] - length)
    scores = (query * scale).reshape(count, key.shape[1], groups * length, width) @ key.transpose(2, 3)
    scores = scores.unflatten(2, (groups, length)) + mask
    return (torch.softmax(scores, dim=-1).flatten(2, 3) @ value).reshape(count, heads, length, -1)


@functools.cache
def _varlen_kernel() -> Any:
    """Return torch's varlen attention if it has the arguments of 2.13 (they changed between releases), else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters) else None


def _supports_flash(query: Tensor) -> bool:
    """Whether one kernel computes all sequences of the pack: CUDA, half precision, supported head sizes."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    width = query.shape[-1]
    return query.is_cuda and half and width <= 256 and width % 8 == 0 and _varlen_kernel() is not None


def _varlen(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None) -> Tensor:
    """Flash attention over ragged sequences, [T, H, V]; values narrower than keys are padded."""
    q_ends, k_ends, rows, longest_q, longest_k = _ragged_bounds(packed, query.device)
    if rows is not None:
        key, value = key[rows], value[rows]
    width = value.shape[-1]
    output = _varlen_kernel()(
        query, key, F.pad(value, (0, query.shape[-1] - width)), q_ends, k_ends, longest_q, longest_k, scale=scale,
        window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output[..., :width]


def _ragged_bounds(packed: PackedSequences, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """Cumulative lengths of queries and keys of all calls, rows of the keys call by call, and both maximum lengths."""
    if packed.context == 1:
        return packed.cu_seqlens_q, packed.cu_seqlens_q, None, packed.max_seqlen_q, packed.max_seqlen_q
    if "ragged" not in packed.cache:
        calls = list(_calls(packed))
        sizes = [[rows.stop - rows.start for rows in side] for side in zip(*[call[:2] for call in calls], strict=True)]
        ends = [torch.tensor([0, *itertools.accumulate(side)], dtype=torch.int32, device=device) for side in sizes]
        rows = torch.cat([torch.arange(k.start, k.stop, device=device) for _, k, _ in calls])
        packed.cache["ragged"] = (*ends, rows, max(sizes[0]), max(sizes[1]))
    return packed.cache["ragged"]
