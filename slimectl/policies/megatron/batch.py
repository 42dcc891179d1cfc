"""A pack of rows as one rank computes it, and where the response tokens lie in it.

T tokens that this context-parallel rank holds · S tokens of the whole pack · R response tokens of the pack
M of them whose log-probability this rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimectl.algorithms.packing import DYNAMIC, Batching, Pack, planned
from slimectl.layouts import ParallelLayout
from slimectl.policies.megatron.packed import PackedSequences, packed
from slimectl.types import Row


@dataclass
class Batch:
    """One micro-batch; `members` are the caller's positions of its rows, in the order of `targets_R`."""

    members: list[int]
    sequences: PackedSequences
    tokens_T: Tensor
    row_R: Tensor
    targets_R: Tensor
    mine_M: Tensor
    """Which of the response tokens are predicted by a token of this context-parallel rank."""
    sources_M: Tensor
    """The tokens that predict them."""

    @property
    def targets_M(self) -> Tensor:
        return self.targets_R[self.mine_M]

    def by_row(self, rows: Sequence[Row], values_R: Tensor) -> dict[int, list[float]]:
        """The values of each member's response tokens."""
        values = iter(values_R.tolist())
        return {i: [next(values) for _ in range(rows[i].response_length)] for i in self.members}


def shares(
    rows: Sequence[Row], layout: ParallelLayout, *, max_tokens: int, data: int, batching: Batching = DYNAMIC
) -> list[list[Pack]]:
    """The packs of every data-parallel rank, as many for each; `max_tokens` is what one GPU takes.

    Interleaved pipelines want a multiple of their stages: packs without rows fill up.
    """
    dealt = planned(rows, max_tokens=max_tokens * layout.context, ranks=data, share=False, batching=batching)
    unit = layout.pipeline if layout.virtual_pipeline else 1
    count = -(-len(dealt[0]) // unit) * unit
    return [[*packs, *([[]] * (count - len(packs)))] for packs in dealt]


def laid_out(rows: Sequence[Row], pack: Pack, layout: ParallelLayout, *, rank: int, device: torch.device) -> Batch:
    """`pack` for context-parallel rank `rank`. The last token of a row predicts nothing and stays out."""
    members = [i for bundle in pack for i in bundle.rows]
    inputs = [rows[i].tokens[:-1] if rows[i].response_length else rows[i].tokens for i in members]
    # A rank without rows computes one token that nothing is asked of.
    sequences = packed([len(tokens) for tokens in inputs] or [1], layout, rank=rank, device=device)
    whole_S = torch.zeros(sequences.tokens, dtype=torch.long)
    sources: list[int] = []
    for i, tokens, start in zip(members, inputs, sequences.starts, strict=False):
        whole_S[start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        first = start + rows[i].prompt_length - 1
        sources += range(first, first + rows[i].response_length)
    held_T = sequences.index_T.cpu()
    place_S = torch.full((sequences.tokens,), -1)
    place_S[held_T] = torch.arange(len(held_T))
    place_R = place_S[torch.tensor(sources, dtype=torch.long)]
    mine_M = (place_R >= 0).nonzero()[:, 0]
    targets = [token for i in members for token in rows[i].tokens[rows[i].prompt_length :]]
    row_R = [place for place, i in enumerate(members) for _ in range(rows[i].response_length)]
    return Batch(
        members=members,
        sequences=sequences,
        tokens_T=whole_S[held_T].to(device),
        row_R=torch.tensor(row_R, dtype=torch.long, device=device),
        targets_R=torch.tensor(targets, dtype=torch.long, device=device),
        mine_M=mine_M.to(device),
        sources_M=place_R[mine_M].to(device),
    )
