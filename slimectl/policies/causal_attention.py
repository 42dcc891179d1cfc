"""Causal attention where the queries are the last of the keys: sequences, and branches after a shared prefix.

B sequences of a call · H query heads · K key-value heads · L queries · S keys · D head dimension (of values V)
T tokens of a pack · P tokens of a context.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

CHUNK = 128
"""Queries per call on a CPU. Hidden scores are still computed there, so smaller chunks waste less work."""

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
    def changes_scores(self) -> bool:
        """Return whether there is more to it than a mask. Fused kernels have only masks."""
        return self.cap is not None or self.sinks_H is not None


PLAIN = Scoring()


def causal_attention(
    query_BHLD: Tensor, key_BKSD: Tensor, value_BKSV: Tensor, scale: float | None, scoring: Scoring = PLAIN
) -> Tensor:
    """Return attention [B, H, L, V]. Query l sees the first S - L + l + 1 keys, or the last ones in its window."""
    queries, keys = query_BHLD.shape[2], key_BKSD.shape[2]
    is_windowed = scoring.window is not None and scoring.window < keys
    if scoring.changes_scores or is_windowed or (query_BHLD.device.type == "cpu" and queries < keys):
        return _chunked(query_BHLD, key_BKSD, value_BKSV, scale, scoring)
    if _prefers_dense(query_BHLD, key_BKSD):
        mask_LS = query_BHLD.new_full((queries, keys), -torch.inf).triu_(1)
        return _dense(query_BHLD, key_BKSD, value_BKSV, mask_LS, scale)
    causal: dict[str, Any] = {"is_causal": True}
    if queries < keys:
        causal = {"attn_mask": causal_lower_right(queries, keys)}
    gqa = query_BHLD.shape[1] != key_BKSD.shape[1]
    return F.scaled_dot_product_attention(query_BHLD, key_BKSD, value_BKSV, scale=scale, enable_gqa=gqa, **causal)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, scoring: Scoring = PLAIN
) -> Tensor:
    """Return attention with an additive mask [B, 1, L, S], which must already hide what is outside a window."""
    return _attend(query, key, value, mask, scale, scoring, dense=_prefers_dense(query, key))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, scoring: Scoring, *, dense: bool
) -> Tensor:
    if dense or scoring.changes_scores:
        return _dense(query, key, value, mask, scale, scoring)
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=gqa)


def gather_contexts(states_TKD: Tensor, context_BP: Tensor) -> Tensor:
    """Return the contexts of branches as [B, P, K, D].

    Uses an embedding instead of indexing. In torch (2.13), indexing with several CPU threads and `index_select` on a
    GPU add up the gradients of one token in any order, so runs would not be bitwise reproducible.
    """
    rows = F.embedding(context_BP, states_TKD.reshape(len(states_TKD), -1))
    return rows.view(*context_BP.shape, *states_TKD.shape[1:])


def _chunked(query: Tensor, key: Tensor, value: Tensor, scale: float | None, scoring: Scoring) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    window = keys if scoring.window is None else scoring.window
    if queries <= CHUNK and window >= keys:  # a slice of the whole tensor would cost a copy in backward
        return masked_attention(query, key, value, _lower_right(queries, keys, query), scale, scoring)
    dense, chunks = _prefers_dense(query, key), []
    for start in range(0, queries, CHUNK):
        stop = min(start + CHUNK, queries)
        first, last = max(0, keys - queries + start - window + 1), keys - queries + stop
        mask_LS = _lower_right(stop - start, last - first, query)
        if window < last - first:
            mask_LS = _window_mask(stop - start, last - first, window, query.dtype, query.device)
        part_BHLD, seen = query[:, :, start:stop], slice(first, last)
        chunks.append(_attend(part_BHLD, key[:, :, seen], value[:, :, seen], mask_LS, scale, scoring, dense=dense))
    return torch.cat(chunks, dim=2)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, scoring: Scoring = PLAIN
) -> Tensor:
    """Return attention with its scores in memory. Query heads of one key head are rows of one product."""
    batch, heads, length, width = query.shape
    groups = heads // key.shape[1]
    scaled = query * (width**-0.5 if scale is None else scale)
    scores = scaled.reshape(batch, key.shape[1], groups * length, width) @ key.transpose(2, 3)
    if scoring.cap is not None:
        scores = torch.tanh(scores / scoring.cap) * scoring.cap
    scores.view(batch, key.shape[1], groups, length, -1).add_(mask if mask.ndim == 2 else mask[:, :, None])
    output = torch.softmax(scores, dim=-1) @ value
    if scoring.sinks_H is not None:
        sinks_K = scoring.sinks_H.float().view(key.shape[1], groups).repeat_interleave(length, dim=1)
        # The share of the softmax that is left for real keys, as the sink's value is zero.
        share = torch.sigmoid(torch.logsumexp(scores.float(), dim=-1) - sinks_K)
        output = output * share[..., None].to(output.dtype)
    return output.reshape(batch, heads, length, -1)


def _prefers_dense(query: Tensor, key: Tensor) -> bool:
    """Return whether two products beat flash attention. On CPU in bfloat16, torch 2.13's takes 3 to 9 times as long."""
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and scores <= DENSE_SCORES


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


@functools.lru_cache(maxsize=16)
def _window_mask(queries: int, keys: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an additive mask [L, S] for the last queries: each sees itself and the window - 1 keys before it."""
    with torch.inference_mode(False):
        hidden = torch.full((queries, keys), -torch.inf, dtype=dtype, device=device)
        return hidden.triu(keys - queries + 1) + hidden.tril(keys - queries - window)
