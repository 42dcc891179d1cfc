"""Causal attention where the queries are the last of the keys: sequences, and branches after a shared prefix.

B sequences of a call · H query heads · K key-value heads · L queries · S keys · D head dimension (of values V)
T tokens of a pack · P tokens of a context.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from slimectl.policies.recompute import recomputed

CHUNK = 128
"""Queries per call on a CPU. Hidden scores are still computed there, so smaller chunks waste less work."""

GPU_CHUNK = 1024
"""Most queries per call of attention with a window on a GPU."""

DENSE_SCORES = 2**26
"""Most attention scores that one call holds in memory (128 MiB in bfloat16). Above it, use flash attention."""


@dataclass(frozen=True, eq=False)
class Scoring:
    """What a layer does with its attention scores, besides the causal mask.

    With a `window`, a query sees only itself and the window - 1 keys before it. `cap` limits scores to
    cap tanh(score / cap) (Gemma 2, arXiv:2408.00118). `sinks_H` are logits of one more key for each query head, whose
    value is zero (gpt-oss, arXiv:2508.10925).
    """

    window: int | None = None
    cap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def sinks(self) -> int:
        """Return how many keys stand for sinks."""
        return int(self.sinks_H is not None)


PLAIN = Scoring()


def causal_attention(
    query_BHLD: Tensor, key_BKSD: Tensor, value_BKSV: Tensor, scale: float | None, scoring: Scoring = PLAIN
) -> Tensor:
    """Return attention [B, H, L, V]. Query l sees the first S - L + l + 1 keys, or the last ones in its window."""
    if scoring.sinks_H is not None:
        q, k, v = _with_sink(query_BHLD, key_BKSD, value_BKSV, scale, scoring.sinks_H)
        scale = query_BHLD.shape[-1] ** -0.5 if scale is None else scale
        return _causal(q, k, v, scale, scoring)[..., : value_BKSV.shape[-1]]
    return _causal(query_BHLD, key_BKSD, value_BKSV, scale, scoring)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, scoring: Scoring = PLAIN
) -> Tensor:
    """Return attention with an additive mask [B, 1, L, S], which must already hide what is outside a window."""
    if scoring.sinks_H is not None:
        q, k, v = _with_sink(query, key, value, scale, scoring.sinks_H)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return _masked(q, k, v, F.pad(mask, (1, 0)), scale, scoring)[..., : value.shape[-1]]
    return _masked(query, key, value, mask, scale, scoring)


def gather_contexts(states_TKD: Tensor, context_BP: Tensor) -> Tensor:
    """Return the contexts of branches as [B, P, K, D].

    Uses an embedding instead of indexing. In torch (2.13), indexing with several CPU threads and `index_select` on a
    GPU add up the gradients of one token in any order, so runs would not be bitwise reproducible.
    """
    rows = F.embedding(context_BP, states_TKD.reshape(len(states_TKD), -1))
    return rows.view(*context_BP.shape, *states_TKD.shape[1:])


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with the sink as first key. Its score is one more dimension of the queries.

    So fused kernels compute it, with its gradient. Values get as many dimensions, as kernels require.
    """
    width = query.shape[-1]
    sinks_H11 = sinks_H.to(query.dtype)[:, None, None] / (width**-0.5 if scale is None else scale)
    sink_BK1D = F.pad(torch.zeros_like(key[:, :, :1]), (0, 1), value=1.0)
    q = torch.cat([query, sinks_H11.expand(*query.shape[:-1], 1)], dim=-1)
    k = torch.cat([sink_BK1D, F.pad(key, (0, 1))], dim=2)
    return q, k, F.pad(value, (0, max(0, width + 1 - value.shape[-1]), 1, 0))


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None, scoring: Scoring) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    if scoring.window is not None and scoring.window >= keys - scoring.sinks:
        scoring = replace(scoring, window=None)
    is_windowed = scoring.window is not None
    if is_windowed or scoring.cap is not None or (query.device.type == "cpu" and queries < keys):
        return _chunked(query, key, value, scale, scoring)
    if _prefers_dense(query, key):
        mask_LS = query.new_full((queries, keys), -torch.inf).triu_(1)
        return _dense(query, key, value, mask_LS, scale)
    causal: dict[str, Any] = {"is_causal": True}
    if queries < keys:
        causal = {"attn_mask": causal_lower_right(queries, keys)}
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=gqa, **causal)


def _chunked(query: Tensor, key: Tensor, value: Tensor, scale: float | None, scoring: Scoring) -> Tensor:
    """Compute chunks of queries with the keys that they may see. With a window, time is linear in the keys."""
    window, sinks = scoring.window, scoring.sinks
    queries, keys = query.shape[2], key.shape[2] - sinks
    size, context = _chunk_size(query, window), keys - queries
    unseen = 0 if window is None else max(0, context + 1 - window)
    if queries <= size and not unseen:
        return _masked(query, key, value, _band(queries, keys, scoring, query), scale, scoring)
    # Pieces, not slices: the backward pass of a slice fills a tensor of all keys.
    parts = query.split(size, dim=2)
    sizes = [sinks, unseen, context - unseen, *(part.shape[2] for part in parts)]
    ends = [end - sinks for end in itertools.accumulate(sizes)]
    key_pieces, value_pieces = key.split(sizes, dim=2), value.split(sizes, dim=2)
    outputs = []
    for i, part in enumerate(parts):
        first_seen = 0 if window is None else context + i * size + 1 - window
        visible = [0, *(j for j in range(1, i + 4) if ends[j] > first_seen)]
        k, v = (torch.cat([pieces[j] for j in visible], dim=2) for pieces in (key_pieces, value_pieces))
        mask_LS = _band(part.shape[2], k.shape[2] - sinks, scoring, query)
        outputs.append(_masked(part, k, v, mask_LS, scale, scoring))
    return torch.cat(outputs, dim=2)


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, scoring: Scoring) -> Tensor:
    if scoring.cap is not None:
        attend = _dense if _score_count(query, key) <= DENSE_SCORES else recomputed(_dense)
        capped: Tensor = attend(query, key, value, mask, scale, scoring)
        return capped
    if _prefers_dense(query, key):
        return _dense(query, key, value, mask, scale)
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=gqa)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, scoring: Scoring = PLAIN
) -> Tensor:
    """Return attention with its scores in memory. Query heads of one key head are rows of one product."""
    batch, heads, length, width = query.shape
    groups = heads // key.shape[1]
    scaled = query * (width**-0.5 if scale is None else scale)
    scores = scaled.reshape(batch, key.shape[1], groups * length, width) @ key.transpose(2, 3)
    if scoring.cap is not None:
        sink, others = scores.tensor_split([scoring.sinks], dim=-1)
        scores = torch.cat([sink, torch.tanh(others / scoring.cap) * scoring.cap], dim=-1)
    scores.view(batch, key.shape[1], groups, length, -1).add_(mask if mask.ndim == 2 else mask[:, :, None])
    return (torch.softmax(scores, dim=-1) @ value).reshape(batch, heads, length, -1)


def _prefers_dense(query: Tensor, key: Tensor) -> bool:
    """Return whether two products beat flash attention. On CPU in bfloat16, torch 2.13's takes 3 to 9 times as long."""
    is_slow = query.device.type == "cpu" and query.dtype == torch.bfloat16
    return is_slow and _score_count(query, key) <= DENSE_SCORES


def _score_count(query: Tensor, key: Tensor) -> int:
    return query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]


def _chunk_size(query: Tensor, window: int | None) -> int:
    return CHUNK if query.device.type == "cpu" else min(max(CHUNK, window or 0), GPU_CHUNK)


def _band(queries: int, keys: int, scoring: Scoring, like: Tensor) -> Tensor:
    """Return an additive mask [L, S] for the last `queries` of `keys` keys, after the sink if there is one."""
    size, window, context = _chunk_size(like, scoring.window), scoring.window, keys - queries
    if window is None:
        return _lower_right(queries, keys + scoring.sinks, like)
    reach = 2 * window + size  # a chunk's first key is fewer keys before its first query
    matrix = _band_matrix(size, reach, window, like.dtype, like.device)
    mask_LS = matrix[:queries, reach - context : reach - context + keys]
    if scoring.sinks:
        return F.pad(mask_LS, (scoring.sinks, 0))
    return mask_LS if like.device.type == "cpu" else mask_LS.contiguous()


def _lower_right(queries: int, keys: int, like: Tensor) -> Tensor:
    """Return an additive mask [L, S] of at most CHUNK queries, a view of one matrix for all layers and lengths."""
    width = 1 << (keys - 1).bit_length()
    hidden_from_first = width - (keys - queries)
    mask = _mask_matrix(width, like.dtype, like.device)
    return mask[:queries, hidden_from_first : hidden_from_first + keys]


@functools.lru_cache(maxsize=4)
def _mask_matrix(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a matrix [CHUNK, width + CHUNK] that hides from row l the columns after width + l."""
    with torch.inference_mode(False):
        return torch.full((CHUNK, width + CHUNK), -torch.inf, dtype=dtype, device=device).triu_(width + 1)


@functools.lru_cache(maxsize=8)
def _band_matrix(size: int, reach: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a matrix [size, reach + size] that shows to row l the `window` columns that end at reach + l."""
    with torch.inference_mode(False):
        hidden = torch.full((2, size, reach + size), -torch.inf, dtype=dtype, device=device)
        return hidden[0].triu_(reach + 1).add_(hidden[1].tril_(reach - window))
