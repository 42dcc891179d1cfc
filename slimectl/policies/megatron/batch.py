"""A pack of rows as one rank computes it, with the positions of its response tokens.

T tokens of this context-parallel rank · S tokens of the whole pack · R response tokens of the pack
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
    """One micro-batch; `members` are the indices of its rows in the caller's batch, in the order of `targets_R`."""

    members: list[int]
    sequences: PackedSequences
    tokens_T: Tensor
    row_R: Tensor
    targets_R: Tensor
    mine_M: Tensor
    """Indices of the response tokens that are predicted by a token of this context-parallel rank."""
    sources_M: Tensor
    """The tokens that predict them."""

    @property
    def targets_M(self) -> Tensor:
        return self.targets_R[self.mine_M]

    def by_row(self, rows: Sequence[Row], values_R: Tensor) -> dict[int, list[float]]:
        """Values of each member's response tokens, by index of the row."""
        values = iter(values_R.tolist())
        return {i: [next(values) for _ in range(rows[i].response_length)] for i in self.members}


def shares(
    rows: Sequence[Row], layout: ParallelLayout, *, max_tokens: int, data: int, batching: Batching = DYNAMIC
) -> list[list[Pack]]:
    """Packs of every data-parallel rank, the same number for each; `max_tokens` is the limit of one GPU.

    Interleaved pipelines need a multiple of their stages: packs without rows are added.
    """
    packs_by_rank = planned(rows, max_tokens=max_tokens * layout.context, ranks=data, share=False, batching=batching)
    multiple = layout.pipeline if layout.virtual_pipeline else 1
    count = -(-len(packs_by_rank[0]) // multiple) * multiple
    return [[*packs, *([[]] * (count - len(packs)))] for packs in packs_by_rank]


def laid_out(rows: Sequence[Row], pack: Pack, layout: ParallelLayout, *, rank: int, device: torch.device) -> Batch:
    """Build the part of `pack` for context-parallel rank `rank`.

    The last token of a row predicts nothing and is left out.
    """
    members = [i for bundle in pack for i in bundle.rows]
    inputs = [rows[i].tokens[:-1] if rows[i].response_length else rows[i].tokens for i in members]
    # A rank without rows computes one unused token.
    sequences = packed([len(tokens) for tokens in inputs] or [1], layout, rank=rank, device=device)
    tokens_S = torch.zeros(sequences.tokens, dtype=torch.long)
    sources: list[int] = []
    for i, tokens, start in zip(members, inputs, sequences.starts, strict=False):
        tokens_S[start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        first = start + rows[i].prompt_length - 1
        sources += range(first, first + rows[i].response_length)
    index_T = sequences.index_T.cpu()
    local_S = torch.full((sequences.tokens,), -1)
    local_S[index_T] = torch.arange(len(index_T))
    local_R = local_S[torch.tensor(sources, dtype=torch.long)]
    mine_M = (local_R >= 0).nonzero()[:, 0]
    targets = [token for i in members for token in rows[i].tokens[rows[i].prompt_length :]]
    row_R = [position for position, i in enumerate(members) for _ in range(rows[i].response_length)]
    return Batch(
        members=members,
        sequences=sequences,
        tokens_T=tokens_S[index_T].to(device),
        row_R=torch.tensor(row_R, dtype=torch.long, device=device),
        targets_R=torch.tensor(targets, dtype=torch.long, device=device),
        mine_M=mine_M.to(device),
        sources_M=local_R[mine_M].to(device),
    )
