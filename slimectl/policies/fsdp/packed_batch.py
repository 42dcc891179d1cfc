"""A pack in the attention grid: spans of similar length are grouped and padded to one length.

T input tokens · N rows of the attention grid (T plus padding) · B spans of a bucket · L their padded length
P tokens of a context. All tensors are built once per pack and read by every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from slimectl.data.images import ImageProcessor
from slimectl.policies.causal_attention import CHUNK
from slimectl.policies.fsdp.packed_rows import LEAST_FILL, PackedRows, joined_rows, padded_rows
from slimectl.policies.fsdp.vision import ImageBatch, image_batch
from slimectl.policies.pack_plan import AttentionSpan, PackPlan, Predictions

CALL_PAIRS = 4096
"""Number of attention pairs that cost about the same as one call on a CPU. A bucket may have this many as padding."""


@dataclass(frozen=True)
class CausalBucket:
    """Sequences of similar length, each attending to itself: rows [start, start + count · length) of the grid."""

    start: int
    count: int
    length: int


@dataclass(frozen=True)
class BranchBucket:
    """Branches of similar length, each attending to its context and causally to itself."""

    start: int
    count: int
    length: int
    context_BP: Tensor
    """Input positions of the tokens before the branch, padded with the first of them."""
    mask_BLK: Tensor | None
    """Additive: 0 where token l may see key k of [context | branch], -inf elsewhere. [B, 1, L, P + L].

    None if all contexts have one length, because the mask is then only causal."""
    spans: list[AttentionSpan]
    cuts: dict[int, BranchBucket] = field(default_factory=dict)
    """The bucket for layers with a window, by their windows."""

    def cut(self, window: int, like: Tensor) -> BranchBucket:
        """Return the bucket for layers with a sliding window: contexts have only what the window reaches."""
        if window not in self.cuts:
            self.cuts[window] = _branches(self.spans, self.start, self.length, like.dtype, like.device, window)
        return self.cuts[window]


@dataclass
class PackedBatch:
    """One pack as tensors."""

    plan: PackPlan
    tokens_T: Tensor
    positions_T: Tensor
    targets_R: Tensor
    predictions: Predictions
    order_N: Tensor
    """Input position at each row of the grid (0 for padding)."""
    place_T: Tensor
    """Grid row of each input position."""
    causal: list[CausalBucket]
    branches: list[BranchBucket]
    images: ImageBatch | None = None
    mixed_layers: set[int] = field(default_factory=set)
    """Layers that have mixed tokens along the sequence in a way that knows packs."""

    @cached_property
    def joined_rows(self) -> PackedRows:
        return joined_rows(self.plan.spans, self.tokens_T.device)

    @cached_property
    def padded_rows(self) -> PackedRows:
        return padded_rows(self.plan.spans, self.tokens_T.device)


def build_packed_batch(
    plan: PackPlan,
    *,
    dtype: torch.dtype,
    device: torch.device,
    processor: Callable[[], ImageProcessor] | None = None,
) -> PackedBatch:
    """Build the tensors of `plan`. Attention masks and patches have `dtype`. `processor` reads images."""
    order, causal, branches = _grid(plan.spans, dtype=dtype, device=device)
    # On the host, because on a GPU this would wait for the number of real rows.
    (real_N,) = np.nonzero(order >= 0)
    place = np.empty(len(plan.tokens_T), dtype=np.int64)
    place[order[real_N]] = real_N

    def as_tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    return PackedBatch(
        plan=plan, tokens_T=as_tensor(plan.tokens_T), positions_T=as_tensor(plan.positions_T),
        targets_R=as_tensor(plan.targets_R), predictions=plan.predictions.to(device),
        order_N=as_tensor(order.clip(min=0)), place_T=as_tensor(place), causal=causal, branches=branches,
        images=image_batch(plan, processor, dtype=dtype, device=device),
    )  # fmt: skip


def _grid(
    spans: list[AttentionSpan], *, dtype: torch.dtype, device: torch.device
) -> tuple[np.ndarray, list[CausalBucket], list[BranchBucket]]:
    """Group spans into buckets, and list the input position at each row of the grid (-1 for padding)."""
    order: list[np.ndarray] = []
    causal: list[CausalBucket] = []
    branches: list[BranchBucket] = []
    rows = 0
    for bucket in _buckets(spans):
        length = max(span.length for span in bucket)
        if len(bucket[0].context):
            branches.append(_branches(bucket, rows, length, dtype, device))
        else:
            causal.append(CausalBucket(rows, len(bucket), length))
        order_BL = np.full((len(bucket), length), -1)
        for order_L, span in zip(order_BL, bucket, strict=True):
            order_L[: span.length] = np.arange(span.start, span.start + span.length)
        order.append(order_BL.reshape(-1))
        rows += len(bucket) * length
    return np.concatenate(order), causal, branches


def _buckets(spans: list[AttentionSpan]) -> list[list[AttentionSpan]]:
    """Sort spans into buckets: roots first, then branches in descending order of context length.

    A new bucket starts where padding would cost more than a call. Long branches fill calls of their own, so they are
    grouped only with branches of equal context length, which need no mask.
    """
    buckets: list[list[AttentionSpan]] = []
    real = length = depth = 0
    for span in sorted(spans, key=lambda span: (len(span.context) > 0, -len(span.context), -span.length, span.start)):
        real, length = real + span.area, max(length, span.length)
        is_new = not buckets or bool(depth) != bool(len(span.context))
        is_new = is_new or (len(span.context) != depth and length > CHUNK)
        if is_new or _waste(length, depth, len(buckets[-1]) + 1, real) > 0:
            buckets.append([])
            real, length, depth = span.area, span.length, len(span.context)
        buckets[-1].append(span)
    return buckets


def _waste(length: int, depth: int, count: int, real: int) -> float:
    """Return the number of padded attention pairs of a bucket, minus the number that it may have."""
    padded = count * length * (depth + length)
    return padded - real - max(CALL_PAIRS, (1 - LEAST_FILL) * padded)


def _branches(
    bucket: list[AttentionSpan],
    start: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
) -> BranchBucket:
    """Build a bucket of branches. A padded row sees its context or itself: a softmax over nothing would be NaN."""
    lengths = [len(span.context) if window is None else min(len(span.context), window - 1) for span in bucket]
    widest = max(lengths)
    context_BP = np.empty((len(bucket), widest), dtype=np.int64)
    for context_P, span, count in zip(context_BP, bucket, lengths, strict=True):
        context_P[:] = span.context[0]
        context_P[:count] = span.context[len(span.context) - count :]
    mask_BLK = None
    if min(lengths) < widest:
        visible_BLK = np.zeros((len(bucket), length, widest + length), dtype=bool)
        for visible_LK, count in zip(visible_BLK, lengths, strict=True):
            own_LK = _causal(length, count, window)
            visible_LK[:, :count], visible_LK[:, widest:] = own_LK[:, :count], own_LK[:, count:]
        hidden_BLK = torch.from_numpy(~visible_BLK).to(device)
        mask_BLK = torch.zeros(hidden_BLK.shape, dtype=dtype, device=device).masked_fill_(hidden_BLK, -torch.inf)[
            :, None
        ]
    return BranchBucket(start, len(bucket), length, torch.from_numpy(context_BP).to(device), mask_BLK, bucket)


def _causal(length: int, context: int, window: int | None) -> np.ndarray:
    """Return which of `context` + `length` keys the last `length` tokens see."""
    visible_LK = np.tri(length, context + length, context, dtype=bool)
    if window is not None:
        visible_LK &= ~np.tri(length, context + length, context - window, dtype=bool)
    return visible_LK
