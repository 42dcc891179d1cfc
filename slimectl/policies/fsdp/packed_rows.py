"""The rows of a pack one by one, with the tokens that they share: what layers with a state along the sequence read.

T input tokens · N tokens of all rows (T, and those before the branches, and padding) · B rows of similar length
L their padded length · H width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.algorithms.gated_delta import Chunks
from slimectl.policies.pack_plan import AttentionSpan

LEAST_FILL = 0.85
"""Least share of what is not padding, among the tokens of rows or the attention pairs of a bucket."""
CALL_TOKENS = 64
"""Number of tokens that cost about the same as one call on a CPU. Rows of one call may have this many as padding."""


class FromRows(torch.autograd.Function):
    """Select the output of every input token. Padding and other outputs get a zero gradient."""

    @staticmethod
    def forward(ctx: Any, states_NH: Tensor, place_T: Tensor) -> Tensor:
        ctx.save_for_backward(place_T)
        ctx.rows = states_NH.shape[0]
        return states_NH.index_select(0, place_T)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None]:
        grad_NH = grad_TH.new_zeros(ctx.rows, grad_TH.shape[1])
        return grad_NH.index_copy_(0, ctx.saved_tensors[0], grad_TH), None


@dataclass(frozen=True)
class PackedRows:
    """Rows [context | span] in blocks of `shapes` (B, L). Shared tokens are in each of their rows."""

    shapes: list[tuple[int, int]]
    lengths: list[int]
    """Lengths of the rows without padding."""
    order_N: Tensor | None
    """Input position of each token of the rows, 0 for padding. None if the rows are the pack as it is."""
    place_T: Tensor
    """Place in the rows of the output of each input token."""

    def gather(self, states_TH: Tensor) -> list[Tensor]:
        """Return the states [B, L, H] of each block. A shared token gets the sum of its gradients."""
        states_NH = states_TH if self.order_N is None else F.embedding(self.order_N, states_TH)
        parts = states_NH.split([count * length for count, length in self.shapes])
        return [part.view(*shape, -1) for part, shape in zip(parts, self.shapes, strict=True)]

    def outputs(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the outputs [T, H] of the input tokens from the outputs [B, L, H] of each block."""
        states_NH = torch.cat([block.flatten(0, 1) for block in blocks]) if len(blocks) > 1 else blocks[0].flatten(0, 1)
        if self.order_N is None:
            return states_NH
        selected_TH: Tensor = FromRows.apply(states_NH, self.place_T)  # type: ignore[no-untyped-call]
        return selected_TH

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks of the gated delta rule, for rows without padding."""
        return Chunks(self.lengths, self.place_T.device)

    @cached_property
    def positions_N(self) -> Tensor:
        """Position of each token in its row, for rows without padding."""
        return torch.cat([torch.arange(length) for length in self.lengths]).to(self.place_T.device)

    @cached_property
    def kernel_arguments(self) -> dict[str, Tensor]:
        """Where rows start and end, as causal-conv1d and flash-linear-attention take it, for rows without padding."""
        ends = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        row_N = torch.repeat_interleave(torch.arange(len(self.lengths), dtype=torch.int32), torch.tensor(self.lengths))
        device = self.place_T.device
        return {"cu_seq_lens_q": ends.to(device), "seq_idx": row_N[None].to(device)}


def joined_rows(spans: Sequence[AttentionSpan], device: torch.device) -> PackedRows:
    """Return the rows one after the other, in one block without padding."""
    lengths = [len(span.context) + span.length for span in spans]
    rows = _rows([[span] for span in spans], lengths, device)
    is_pack = not any(len(span.context) for span in spans)
    return PackedRows([(1, sum(lengths))], lengths, None if is_pack else rows.order_N, rows.place_T)


def padded_rows(spans: Sequence[AttentionSpan], device: torch.device) -> PackedRows:
    """Return rows of similar length in blocks, padded on the right, where no token of the row sees it."""
    groups: list[list[AttentionSpan]] = []
    longest = real = 0
    for span in sorted(spans, key=lambda span: -_length(span)):
        padded = (len(groups[-1]) + 1) * longest if groups else 0
        real += _length(span)
        if not groups or padded - real > max(CALL_TOKENS, (1 - LEAST_FILL) * padded):
            groups.append([])
            longest = real = _length(span)
        groups[-1].append(span)
    return _rows(groups, [_length(group[0]) for group in groups], device)


def _length(span: AttentionSpan) -> int:
    return len(span.context) + span.length


def _rows(groups: list[list[AttentionSpan]], lengths: list[int], device: torch.device) -> PackedRows:
    order: list[np.ndarray] = []
    place_T = np.empty(sum(span.length for group in groups for span in group), dtype=np.int64)
    start = 0
    for group, length in zip(groups, lengths, strict=True):
        order_BL = np.zeros((len(group), length), dtype=np.int64)
        for order_L, span in zip(order_BL, group, strict=True):
            own = np.arange(span.start, span.start + span.length)
            order_L[: _length(span)] = np.concatenate([span.context, own])
            place_T[own] = start + len(span.context) + np.arange(span.length)
            start += length
        order.append(order_BL.reshape(-1))
    return PackedRows(
        [(len(group), length) for group, length in zip(groups, lengths, strict=True)],
        [_length(span) for group in groups for span in group],
        torch.from_numpy(np.concatenate(order)).to(device), torch.from_numpy(place_T).to(device),
    )  # fmt: skip
