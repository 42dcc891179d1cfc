"""Packed sequences: the description of a batch that every layer reads.

T tokens of this rank · S tokens of the whole row. Under context parallelism a sequence is split into 2·C chunks
and rank r of C holds chunks r and 2·C - 1 - r (zig-zag: causal attention costs every rank the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slimectl.layouts import ParallelLayout
from slimectl.policies.megatron.rotary import Angles


@dataclass
class PackedSequences(PackedSeqParams):
    """mcore's description of packed sequences, extended for the layers of this package.

    `lengths` are those of the sequences with their padding, over all context-parallel ranks; `starts` their first
    positions in the row.
    """

    lengths: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    context: int = 1
    rank: int = 0
    index_T: Any = None
    """Position in the row of each token of this rank."""
    positions_T: Any = None
    """Its position in its sequence."""
    padding_T: Any = None
    """Whether it is padding."""
    order_S: Any = None
    """Index of each position of the row in the concatenation of the ranks' tokens; None for one rank."""
    angles: Angles | None = None
    """Rotary angles of the tokens, set by the model."""
    cache: dict[str, Any] = field(default_factory=dict)
    """Values that attention derives from the lengths once per batch."""

    @property
    def tokens(self) -> int:
        """Tokens of the whole row, padding included."""
        return sum(self.lengths)


def packed(lengths: Sequence[int], layout: ParallelLayout, *, rank: int, device: torch.device) -> PackedSequences:
    """Pack sequences of these lengths for context-parallel rank `rank`, padded as `layout` requires.

    Every sequence is padded to a multiple of 2·C, and the last one further until tensor parallelism can split the row;
    padding follows its sequence, where the causal mask hides it.

    >>> packed([5, 3], ParallelLayout(context=2), rank=0, device=torch.device("cpu")).index_T.tolist()
    [0, 1, 6, 7, 8, 11]
    """
    padded = _padded_lengths(lengths, layout)
    starts = tuple(accumulate(padded, initial=0))[:-1]
    index = [_local_positions(padded, starts, r, layout.context) for r in range(layout.context)]
    index_T = index[rank].to(device)
    start_S = torch.repeat_interleave(torch.tensor(starts), torch.tensor(padded)).to(device)
    real_S = torch.repeat_interleave(torch.tensor(starts) + torch.tensor(lengths), torch.tensor(padded)).to(device)
    order_S = None
    if layout.context > 1:
        gathered_S = torch.cat(index)
        order_S = torch.empty_like(gathered_S)
        order_S[gathered_S] = torch.arange(len(gathered_S))
        order_S = order_S.to(device)
    ends_B = torch.tensor([0, *accumulate(padded)], dtype=torch.int32, device=device)
    return PackedSequences(
        qkv_format="thd", cu_seqlens_q=ends_B, cu_seqlens_kv=ends_B, max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded), lengths=tuple(padded), starts=starts, context=layout.context, rank=rank,
        index_T=index_T, positions_T=index_T - start_S[index_T], padding_T=index_T >= real_S[index_T], order_S=order_S,
    )  # fmt: skip


def _padded_lengths(lengths: Sequence[int], layout: ParallelLayout) -> list[int]:
    unit = 2 * layout.context if layout.context > 1 else 1
    padded = [-(-length // unit) * unit for length in lengths]
    padded[-1] += -sum(padded) % (unit * layout.tensor)
    return padded


def _local_positions(lengths: Sequence[int], starts: Sequence[int], rank: int, context: int) -> Tensor:
    """Positions in the row of context-parallel rank `rank`."""
    if context == 1:
        return torch.arange(sum(lengths))
    parts = []
    for length, start in zip(lengths, starts, strict=True):
        chunk = length // (2 * context)
        for part in (rank, 2 * context - 1 - rank):
            parts.append(torch.arange(start + part * chunk, start + (part + 1) * chunk))
    return torch.cat(parts)
