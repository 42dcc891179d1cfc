"""Attention over a pack: one dense call per bucket of similar lengths, for any number of sequences.

T input tokens · N rows of the padded grid · B spans of a bucket · L, S their padded length · P tokens of a context
H query heads · K key-value heads · D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slimectl.errors import CheckpointError
from slimectl.policies.causal_attention import Scoring, causal_attention, gather_contexts, masked_attention
from slimectl.policies.fsdp.packed_batch import BranchBucket, CausalBucket, PackedBatch
from slimectl.policies.fsdp.packed_rows import FromRows
from slimectl.policies.recompute import recomputed

NAME = "slimectl_packed"
RECOMPUTED = "slimectl_packed_recomputed"
"""Name of the same attention when backward recomputes it."""
RECOMPUTED_SDPA = "slimectl_sdpa_recomputed"
"""Name of transformers' attention by torch's `scaled_dot_product_attention`, recomputed in backward."""


class _ToGrid(torch.autograd.Function):
    """Reorder from input order to grid order. Every input token has one row, so backward is also a gather."""

    @staticmethod
    def forward(ctx: Any, source_TW: Tensor, order_N: Tensor, place_T: Tensor) -> Tensor:
        ctx.save_for_backward(place_T)
        return source_TW.index_select(0, order_N)

    @staticmethod
    def backward(ctx: Any, grad_NW: Tensor) -> tuple[Tensor, None, None]:
        return grad_NW.index_select(0, ctx.saved_tensors[0]), None, None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: PackedBatch,
    scaling: float | None = None,
    attend: Callable[..., Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: query [1, H, T, D], key and value [1, K, T, D], output [1, T, H, D]."""
    _check(module, attention_mask)
    layout.mixed_layers.add(getattr(module, "layer_idx", len(layout.mixed_layers)))
    window = kwargs["sliding_window"] if "sliding_window" in kwargs else _window_of(module)
    scoring = Scoring(window or None, kwargs.get("softcap"), kwargs.get("s_aux"))
    return (attend or _attend)(query, key, value, layout, scaling, scoring), None


def _check(module: nn.Module, attention_mask: Tensor | None) -> None:
    """Raise CheckpointError for what this attention does not compute."""
    reason = None
    if attention_mask is not None:
        reason = "its own mask"
    elif not getattr(module, "is_causal", True):
        reason = "attention to later tokens"
    if reason:
        raise CheckpointError(
            f"{type(module).__name__} asks for {reason}, which packed training does not compute."
            " Train a model of another architecture."
        )


def _window_of(module: Any) -> int | None:
    """Return the window of a layer that does not pass it, because transformers has it only in the layer's mask."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and layer is not None and kinds[layer] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def recomputed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute packed_attention so that autograd keeps only query, key and value."""
    return packed_attention(module, query, key, value, attention_mask, attend=recomputed(_attend), **kwargs)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedBatch, scale: float | None, scoring: Scoring
) -> Tensor:
    query_THD, key_TKD, value_TKD = (states[0].transpose(0, 1) for states in (query, key, value))
    parts = (_buckets(_grid(states, layout), layout) for states in (query_THD, key_TKD, value_TKD))
    outputs = []
    for bucket, (q, k, v) in zip([*layout.causal, *layout.branches], zip(*parts, strict=True), strict=True):
        mask_BLK = None
        if isinstance(bucket, BranchBucket):
            k, v, mask_BLK = _after_context(k, v, key_TKD, value_TKD, bucket, scoring.window)
        if mask_BLK is None:
            # Padding comes after its sequence, where the causal mask hides it.
            outputs.append(_flat(causal_attention(q, k, v, scale, scoring)))
        else:
            outputs.append(_flat(masked_attention(q, k, v, mask_BLK, scale, scoring)))
    output_NW = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    output_TW = FromRows.apply(output_NW, layout.place_T)  # type: ignore[no-untyped-call]
    output_THD: Tensor = output_TW.view(1, query.shape[2], query.shape[1], -1)
    return output_THD


def _grid(states_TXD: Tensor, layout: PackedBatch) -> Tensor:
    tokens, heads, width = states_TXD.shape
    flat_TW = states_TXD.reshape(tokens, heads * width)
    grid_NW: Tensor = _ToGrid.apply(flat_TW, layout.order_N, layout.place_T)  # type: ignore[no-untyped-call]
    return grid_NW.view(-1, heads, width)


def _buckets(states_NXD: Tensor, layout: PackedBatch) -> list[Tensor]:
    """Return the rows of every bucket as [B, X, S, D], roots first. Their gradients are assembled at once."""
    buckets: list[CausalBucket | BranchBucket] = [*layout.causal, *layout.branches]
    parts = states_NXD.split([bucket.count * bucket.length for bucket in buckets])
    return [
        rows.view(bucket.count, bucket.length, *rows.shape[1:]).transpose(1, 2)
        for bucket, rows in zip(buckets, parts, strict=True)
    ]


def _flat(output_BHSD: Tensor) -> Tensor:
    batch, heads, length, width = output_BHSD.shape
    return output_BHSD.transpose(1, 2).reshape(batch * length, heads * width)


def _after_context(
    key: Tensor, value: Tensor, key_TKD: Tensor, value_TKD: Tensor, bucket: BranchBucket, window: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the keys and values [B, K, P + L, D] of branches after their contexts, and their mask."""
    if window is not None and window < bucket.context_BP.shape[1] + bucket.length:
        bucket = bucket.cut(window, key)
    k, v = (
        torch.cat([gather_contexts(states_TKD, bucket.context_BP).transpose(1, 2), states_BKSD], dim=2)
        for states_TKD, states_BKSD in ((key_TKD, key), (value_TKD, value))
    )
    return k, v, bucket.mask_BLK


def register() -> None:
    """Register the attention with transformers under its names."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, packed_attention)
    AttentionInterface.register(RECOMPUTED, recomputed_attention)
    AttentionInterface.register(RECOMPUTED_SDPA, recomputed(sdpa_attention_forward))
    AttentionMaskInterface.register(RECOMPUTED_SDPA, sdpa_mask)
