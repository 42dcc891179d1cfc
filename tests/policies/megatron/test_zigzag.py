"""Context parallelism deals every token once, and its order can be undone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimectl.architectures.parallel import ParallelLayout
from slimectl.policies.megatron.batch import packed

CPU = torch.device("cpu")


def test_nine_tokens_over_two_ranks_by_hand():
    # Chunks of ceil(9 / 4) = 3, the last one padding: 012 345 678 ... ; the outer two and the inner two.
    outer, inner = (packed([9], ParallelLayout(context=2), rank=rank, device=CPU) for rank in (0, 1))
    assert outer.index_T.tolist() == [0, 1, 2, 9, 10, 11]
    assert inner.index_T.tolist() == [3, 4, 5, 6, 7, 8]
    assert outer.padding_T.tolist() == [False] * 3 + [True] * 3
    assert outer.order_S.tolist() == [0, 1, 2, 6, 7, 8, 9, 10, 11, 3, 4, 5]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]))
def test_what_ranks_hold_goes_back_to_the_row(lengths: list[int], context: int, tensor: int):
    layout = ParallelLayout(context=context, tensor=tensor)
    ranks = [packed(lengths, layout, rank=rank, device=CPU) for rank in range(context)]
    row_S = torch.arange(ranks[0].tokens)
    held = torch.cat([row_S[rank.index_T] for rank in ranks])
    assert len({len(rank.index_T) for rank in ranks}) == 1
    assert (held if context == 1 else held[ranks[0].order_S]).tolist() == row_S.tolist()
    assert len(ranks[0].index_T) % tensor == 0
    real = [position for rank in ranks for position in rank.index_T[~rank.padding_T].tolist()]
    starts = ranks[0].starts
    assert sorted(real) == [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
    for rank in ranks:
        assert torch.equal(rank.positions_T, rank.index_T - torch.tensor(starts)[_sequence(rank.index_T, starts)])


@settings(deadline=None)
@given(st.integers(1, 60), st.sampled_from([2, 3, 4]), st.data())
def test_a_rank_holds_its_chunk_from_either_end(length: int, context: int, data: st.DataObject):
    rank = data.draw(st.integers(0, context - 1))
    held = packed([length], ParallelLayout(context=context), rank=rank, device=CPU).index_T.tolist()
    chunk = -(-length // (2 * context))
    first, second = rank * chunk, (2 * context - 1 - rank) * chunk
    assert held == [*range(first, first + chunk), *range(second, second + chunk)]


def _sequence(index_T: torch.Tensor, starts: tuple[int, ...]) -> torch.Tensor:
    return torch.searchsorted(torch.tensor(starts), index_T, right=True) - 1


@pytest.mark.parametrize("context", [2, 4])
def test_causal_attention_costs_every_rank_the_same(context: int):
    """Pairs of a token and what it may attend to, of a sequence that fills its chunks."""
    length = 8 * context
    ranks = [packed([length], ParallelLayout(context=context), rank=rank, device=CPU) for rank in range(context)]
    assert len({int((rank.positions_T + 1).sum()) for rank in ranks}) == 1
