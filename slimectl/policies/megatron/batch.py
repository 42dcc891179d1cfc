"""Packed sequences: the description of a batch that every layer reads.

T tokens of this rank · S tokens of the whole row. Under context parallelism a sequence is split into 2·C chunks and
rank r of C holds chunks r and 2·C - 1 - r (zig-zag, so that causal attention costs every rank the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slimectl.algorithms.packing import DYNAMIC, BatchingOptions, Pack, plan_batches
from slimectl.architectures.parallel import ParallelLayout
from slimectl.errors import SettingsError
from slimectl.policies.megatron.rotary import Angles
from slimectl.policies.pack_plan import PackPlan, Predictions, predicted_once
from slimectl.types import TrainingSample


@dataclass
class PackedSequences(PackedSeqParams):
    """mcore's description of packed sequences, extended for the layers of this package.

    `lengths` are the lengths of the sequences with padding, over all context-parallel ranks. `starts` are their first
    positions in the row. A sequence with a context is a branch: it also attends to that context.
    """

    lengths: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    contexts: tuple[np.ndarray, ...] = ()
    """Row positions of the tokens before each sequence. Empty for a sequence that begins at its first token."""
    context: int = 1
    rank: int = 0
    index_T: Any = None
    """Row position of each token of this rank."""
    positions_T: Any = None
    """Position of each token in its sequence, including the context."""
    padding_T: Any = None
    """Whether each token is padding."""
    order_S: Any = None
    """Index of each row position in the concatenation of the ranks' tokens, or None for one rank."""
    angles: Angles | None = None
    """Rotary angles of the tokens, set by the model."""
    local_angles: Angles | None = None
    """Rotary angles of the tokens in layers with a window, set by the model."""
    selections: dict[int | None, list[Any]] = field(default_factory=dict)
    """Masks of the keys that the indexer of a layer chose, by layer number, for every attention call."""
    cache: dict[str, Any] = field(default_factory=dict)
    """Values that attention derives from the lengths once per batch."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the whole row, including padding."""
        return sum(self.lengths)


def packed(
    lengths: Sequence[int],
    layout: ParallelLayout,
    *,
    rank: int,
    device: torch.device,
    contexts: Sequence[np.ndarray] | None = None,
    multiple: int = 1,
) -> PackedSequences:
    """Pack sequences of these lengths for context-parallel rank `rank`, padded as `layout` requires.

    Every sequence is padded to a multiple of 2·C. The last one is padded further until tensor parallelism can split the
    row into a `multiple` of tokens. Padding comes after its sequence, where the causal mask hides it.

    >>> packed([5, 3], ParallelLayout(context=2), rank=0, device=torch.device("cpu")).index_T.tolist()
    [0, 1, 6, 7, 8, 11]
    """
    padded = _padded_lengths(lengths, layout, multiple)
    contexts = contexts or [np.zeros(0, dtype=np.int64)] * len(padded)
    starts = tuple(accumulate(padded, initial=0))[:-1]
    # On the host: on a GPU each of these would be a launch, and reading the result would wait for it.
    index = _local_positions(padded, starts, rank, layout.context)
    start_S, real_S = np.repeat(starts, padded), np.repeat(np.add(starts, lengths), padded)
    depth_S = np.repeat([len(context) for context in contexts], padded)
    positions = index - start_S[index] + depth_S[index]
    order = None
    if layout.context > 1:
        gathered_S = np.concatenate(
            [_local_positions(padded, starts, r, layout.context) for r in range(layout.context)]
        )
        order = np.empty_like(gathered_S)
        order[gathered_S] = np.arange(len(gathered_S))
    index_T, positions_T, padding_T, order_S = (
        None if values is None else torch.from_numpy(values).to(device)
        for values in (index, positions, index >= real_S[index], order)
    )
    ends_B = torch.tensor([0, *accumulate(padded)], dtype=torch.int32, device=device)
    return PackedSequences(
        qkv_format="thd", cu_seqlens_q=ends_B, cu_seqlens_kv=ends_B, max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded), lengths=tuple(padded), starts=starts, contexts=tuple(contexts),
        context=layout.context, rank=rank, index_T=index_T, positions_T=positions_T, padding_T=padding_T,
        order_S=order_S,
    )  # fmt: skip


def _padded_lengths(lengths: Sequence[int], layout: ParallelLayout, multiple: int) -> list[int]:
    unit = 2 * layout.context if layout.context > 1 else 1
    padded = [-(-length // unit) * unit for length in lengths]
    padded[-1] += -sum(padded) % (unit * layout.tensor * multiple)
    return padded


def _local_positions(lengths: Sequence[int], starts: Sequence[int], rank: int, context: int) -> np.ndarray:
    """Return the row positions of context-parallel rank `rank`."""
    if context == 1:
        return np.arange(sum(lengths))
    parts = []
    for length, start in zip(lengths, starts, strict=True):
        chunk = length // (2 * context)
        for part in (rank, 2 * context - 1 - rank):
            parts.append(np.arange(start + part * chunk, start + (part + 1) * chunk))
    return np.concatenate(parts)


@dataclass
class MicroBatch:
    """One micro-batch as tensors of this context-parallel rank."""

    plan: PackPlan
    sequences: PackedSequences
    paths: list[np.ndarray]
    """Row position of each token that a row's forward reads. Rows that share a token have the same position."""
    tokens_T: Tensor
    targets_R: Tensor
    mine_M: Tensor
    """Indices of the response tokens that a token of this context-parallel rank predicts."""
    predictions: Predictions
    """The tokens of this rank that predict them. Its response tokens are the M of this rank."""


def shares(
    rows: Sequence[TrainingSample],
    layout: ParallelLayout,
    *,
    max_tokens: int,
    data: int,
    share: bool = False,
    batching: BatchingOptions = DYNAMIC,
    marks: Sequence[np.ndarray] | None = None,
) -> list[list[Pack]]:
    """Return the packs of every data-parallel rank, the same number for each. `max_tokens` is the limit of one GPU.

    Interleaved pipelines need a multiple of their stages, so packs without rows are added.
    """
    packs_by_rank = plan_batches(
        rows, max_tokens=max_tokens * layout.context, ranks=data, share=share, batching=batching, marks=marks
    )
    multiple = layout.pipeline if layout.virtual_pipeline else 1
    count = -(-len(packs_by_rank[0]) // multiple) * multiple
    return [[*packs, *([[]] * (count - len(packs)))] for packs in packs_by_rank]


def laid_out(
    plan: PackPlan, layout: ParallelLayout, *, rank: int, device: torch.device, multiple: int = 1
) -> MicroBatch:
    """Build the part of `plan` for context-parallel rank `rank`. Its tokens are a multiple of `multiple`.

    The padding for this is a separate sequence. Appended to another sequence, it would lengthen that attention call.
    """
    if any(row.images for row in plan.rows):
        raise SettingsError('train.backend: "megatron" cannot read images, but some rows have them. Use "fsdp".')
    # Attention computes neighboring spans of equal length and equal context length in one call.
    spans = sorted(plan.spans, key=lambda span: (len(span.context), -span.length))
    lengths = [span.length for span in spans]
    if multiple > 1 and _padded_lengths([*lengths, 0], layout, multiple)[-1]:
        lengths.append(0)
    place = np.empty(len(plan.tokens_T), dtype=np.int64)
    for start, span in zip(accumulate(_padded_lengths(lengths, layout, multiple), initial=0), spans, strict=False):
        place[span.start : span.start + span.length] = np.arange(start, start + span.length)
    none = np.zeros(0, dtype=np.int64)
    contexts = [place[span.context] for span in spans] + [none] * (len(lengths) - len(spans))
    sequences = packed(lengths, layout, rank=rank, device=device, contexts=contexts, multiple=multiple)
    tokens_S = np.zeros(sequences.tokens, dtype=np.int64)
    tokens_S[place] = plan.tokens_T
    index_T = _local_positions(sequences.lengths, sequences.starts, rank, layout.context)
    local_S = np.full(sequences.tokens, -1)
    local_S[index_T] = np.arange(len(index_T))
    local_R = local_S[place[plan.sources_R]]
    (mine_M,) = np.nonzero(local_R >= 0)
    teacher = None if plan.teacher is None else plan.teacher[mine_M]
    predictions = predicted_once(local_R[mine_M], plan.targets_R[mine_M], teacher)
    return MicroBatch(
        plan=plan,
        sequences=sequences,
        paths=[place[path] for path in plan.paths],
        tokens_T=torch.from_numpy(tokens_S[index_T]).to(device),
        targets_R=torch.from_numpy(plan.targets_R).to(device),
        mine_M=torch.from_numpy(mine_M).to(device),
        predictions=predictions.to(device),
    )
