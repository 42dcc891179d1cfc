"""Causal attention over packed sequences, with context parallelism, and the grouped-query attention that uses it.

T tokens of this rank · S tokens of the row · H query heads · K key-value heads · D head dimension (of values V) · B
sequences of one call · L their length · P tokens of a context. TransformerEngine's attention is never used, even if it
is installed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from slimectl.policies.causal_attention import PLAIN, Scoring, causal_attention, gather_contexts, masked_attention
from slimectl.policies.megatron.batch import PackedSequences
from slimectl.policies.megatron.rotary import rotated


class PackedCoreAttention(nn.Module):
    """mcore's core attention for packed sequences.

    mcore's own module (0.16.1, without TransformerEngine) does not support packing, context parallelism, or heads whose
    values are narrower than their keys.
    """

    def __init__(
        self,
        config: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        scoring: Scoring = PLAIN,
        sinks: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.group, self.tp_group = pg_collection.cp, pg_collection.tp
        self.scoring = scoring
        if sinks:  # under the name of mcore's DotProductAttention
            heads = config.num_attention_heads // self.tp_group.size()
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
            self.scoring = replace(scoring, sinks_H=self.softmax_offset)
        self.selecting_layer: int | None = None
        """Number of the layer whose indexer chooses the keys (indexer.py)."""

    def forward(self, query_THD: Tensor, key_TKD: Tensor, value_TKV: Tensor, packed: PackedSequences) -> Tensor:
        """Return the attention output with heads side by side: [T, H·V]."""
        if packed.context > 1:
            # All keys and values are gathered: 2·K·D numbers per token, little compared with the work on the queries.
            key_TKD, value_TKV = (
                gather_from_sequence_parallel_region(states.contiguous(), group=self.group)[packed.order_S]
                for states in (key_TKD, value_TKV)
            )
        masks = packed.selections.get(self.selecting_layer, [])
        is_plain = self.scoring.cap is None and self.scoring.sinks_H is None and not any(m is not None for m in masks)
        if is_plain and _supports_flash(query_THD):
            return _varlen(query_THD, key_TKD, value_TKV, packed, self.scale, self.scoring.window).flatten(1)
        calls = list(calls_of(packed))
        sizes = [call.queries.stop - call.queries.start for call in calls]
        return torch.cat([
            _attend(query, call, key_TKD, value_TKV, self.scale, self.scoring, mask)
            for query, call, mask in zip(query_THD.split(sizes), calls, masks or [None] * len(calls), strict=True)
        ])  # fmt: skip

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Describe the sinks for mcore's checkpoints: sharded by heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


class PackedSelfAttention(SelfAttention):
    """mcore's grouped-query attention with our rotary embedding and core attention, and the same parameters.

    With `local_rope` the layer rotates by the angles of layers with a window. `norms` are classes for query and key
    that mcore does not know of. It rejects them in its own specification (0.19.2).
    """

    def __init__(
        self, *args: Any, local_rope: bool = False, norms: tuple[type, type] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.local_rope = local_rope
        if norms is not None:
            width = self.hidden_size_per_attention_head
            self.q_layernorm, self.k_layernorm = (
                norm(self.config, width, self.config.layernorm_epsilon) for norm in norms
            )

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: PackedSequences, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map [T, 1, hidden] to the same shape. Also returns the bias to add."""
        gated = self.config.attention_output_gate
        query, key, value, *gate = (
            states.squeeze(1) for states in self.get_query_key_value_tensors(hidden_states, output_gate=gated)
        )
        angles = packed_seq_params.local_angles if self.local_rope else packed_seq_params.angles
        assert angles is not None
        query, key = rotated(query, angles), rotated(key, angles)
        output_TW = recomputable(self, query, key, value, packed_seq_params)
        if gate:
            output_TW = output_TW * torch.sigmoid(gate[0].flatten(1))
        return self.linear_proj(output_TW[:, None])


def recomputable(layer: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
    """Compute the layer's core attention, and recompute it in the backward pass if its configuration asks for that."""
    if not (layer.checkpoint_core_attention and layer.training):
        return layer.core_attention(query, key, value, packed)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return layer.core_attention(query, key, value, packed)

    return tensor_parallel.checkpoint(attend, False, query, key, value)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Sequences of one length: rows of their queries, rows of their keys, and the positions of their contexts."""

    queries: slice
    keys: slice
    count: int = 1
    context_BP: Tensor | None = None


def calls_of(packed: PackedSequences) -> Iterator[AttentionCall]:
    """Yield the calls in query order. Neighbors of equal length and equal context length share one call.

    Under context parallelism a call is one chunk of a sequence. Its keys are the context and all tokens up to the
    chunk's end.
    """
    if "calls" not in packed.cache:
        calls = _calls_of_whole_sequences if packed.context == 1 else _calls_of_chunks
        packed.cache["calls"] = list(calls(packed))
    yield from packed.cache["calls"]


def _calls_of_chunks(packed: PackedSequences) -> Iterator[AttentionCall]:
    offset = 0
    for length, start, context in zip(packed.lengths, packed.starts, packed.contexts, strict=True):
        chunk = length // (2 * packed.context)
        context_BP = torch.from_numpy(context[None]).to(packed.index_T.device) if len(context) else None
        for part in (packed.rank, 2 * packed.context - 1 - packed.rank):
            yield AttentionCall(slice(offset, offset + chunk), slice(start, start + (part + 1) * chunk), 1, context_BP)
            offset += chunk


def _calls_of_whole_sequences(packed: PackedSequences) -> Iterator[AttentionCall]:
    start = 0
    sequences = zip(packed.lengths, packed.contexts, strict=True)
    for (length, depth), run in itertools.groupby(sequences, lambda sequence: (sequence[0], len(sequence[1]))):
        contexts = [context for _, context in run]
        rows = slice(start, start + len(contexts) * length)
        context_BP = torch.from_numpy(np.stack(contexts)).to(packed.index_T.device) if depth else None
        yield AttentionCall(rows, rows, len(contexts), context_BP)
        start = rows.stop


def _attend(
    query: Tensor,
    call: AttentionCall,
    key_TKD: Tensor,
    value_TKV: Tensor,
    scale: float | None,
    scoring: Scoring,
    mask: Tensor | None,
) -> Tensor:
    """Attend from queries [B·L, H, D] of a call, which are at the last key positions. Returns [B·L, H·V].

    `mask` [B, 1, L, S] is additive, and None for a causal mask.
    """
    q = query.unflatten(0, (call.count, -1)).transpose(1, 2)
    k, v = (keys_of(states, call).transpose(1, 2) for states in (key_TKD, value_TKV))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if mask is None:
        output_BHLV = causal_attention(q, k, v, scale, scoring)
    else:
        output_BHLV = masked_attention(q, k, v, mask, scale, scoring)
    return output_BHLV.transpose(1, 2).flatten(2).flatten(0, 1)


def keys_of(states_TKD: Tensor, call: AttentionCall) -> Tensor:
    """Return keys or values of a call's sequences, contexts first: [B, S, K, D]."""
    states_BSKD = states_TKD[call.keys].unflatten(0, (call.count, -1))
    if call.context_BP is None:
        return states_BSKD
    return torch.cat([gather_contexts(states_TKD, call.context_BP), states_BSKD], dim=1)


@functools.cache
def _varlen_kernel() -> Any:
    """Return torch's varlen attention if it has the arguments of 2.13 (they changed between releases), else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters) else None


def _supports_flash(query: Tensor) -> bool:
    """Return whether one kernel can compute all sequences of the pack: CUDA, half precision, supported head sizes."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    width = query.shape[-1]
    return query.is_cuda and half and width <= 256 and width % 8 == 0 and _varlen_kernel() is not None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None, window: int | None
) -> Tensor:
    """Compute flash attention over ragged sequences, [T, H, V]. Values narrower than keys are padded."""
    q_ends, k_ends, rows, longest_q, longest_k = _ragged_bounds(packed, query.device)
    if rows is not None:
        key, value = key[rows], value[rows]
    width = value.shape[-1]
    output = _varlen_kernel()(
        query, key, F.pad(value, (0, query.shape[-1] - width)), q_ends, k_ends, longest_q, longest_k, scale=scale,
        window_size=(-1 if window is None else window - 1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output[..., :width]


def _ragged_bounds(packed: PackedSequences, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """Return cumulative query and key lengths of all calls, key rows call by call, and both maximum lengths."""
    if packed.context == 1 and not any(map(len, packed.contexts)):
        return packed.cu_seqlens_q, packed.cu_seqlens_q, None, packed.max_seqlen_q, packed.max_seqlen_q
    if "ragged" not in packed.cache:
        queries, keys = zip(*_ragged_rows(packed), strict=True)
        sizes = (queries, [len(rows) for rows in keys])
        ends = [torch.tensor([0, *itertools.accumulate(side)], dtype=torch.int32, device=device) for side in sizes]
        rows = torch.from_numpy(np.concatenate(keys)).to(device)
        packed.cache["ragged"] = (*ends, rows, *map(max, sizes))
    return packed.cache["ragged"]


def _ragged_rows(packed: PackedSequences) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of queries and the key rows of every sequence, or of every chunk of one."""
    if packed.context > 1:
        for call in calls_of(packed):
            keys = np.arange(call.keys.start, call.keys.stop)
            if call.context_BP is not None:
                keys = np.concatenate([call.context_BP[0].cpu().numpy(), keys])
            yield call.queries.stop - call.queries.start, keys
        return
    for length, start, context in zip(packed.lengths, packed.starts, packed.contexts, strict=True):
        yield length, np.concatenate([context, np.arange(start, start + length)])
