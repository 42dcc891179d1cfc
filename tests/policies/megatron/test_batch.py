"""Where the tokens of rows lie on each context-parallel rank, written out."""

from __future__ import annotations

import pytest
import torch
from policies.policy_cases import random_rows

from slimectl.algorithms.packing import plan_batches, tokens_of
from slimectl.architectures.parallel import ParallelLayout
from slimectl.policies.megatron.attention import calls_of
from slimectl.policies.megatron.batch import MicroBatch, laid_out, packed, shares
from slimectl.policies.pack_plan import plan_pack
from slimectl.types import TrainingSample

ROWS = [
    TrainingSample([1, 2, 3, 4, 5], 2, [1.0] * 2),
    TrainingSample([6, 7, 8], 1, [1.0], group=1),
    TrainingSample([9, 10], 0, [], group=2),
]


def batch(layout: ParallelLayout, rank: int = 0) -> MicroBatch:
    [[pack]] = plan_batches(ROWS, max_tokens=50, share=False)
    return laid_out(plan_pack(ROWS, pack), layout, rank=rank, device=torch.device("cpu"))


def test_the_last_token_of_a_response_predicts_nothing_and_stays_out():
    made = batch(ParallelLayout())
    assert made.plan.members == [0, 1, 2]
    assert made.tokens_T.tolist() == [1, 2, 3, 4, 6, 7, 9, 10]
    assert made.targets_R.tolist() == [4, 5, 8]
    assert made.tokens_T[made.predictions.sources_U].tolist() == [3, 4, 7]
    assert made.plan.row_R.tolist() == [0, 0, 1]
    assert made.plan.by_row(torch.tensor([0.5, 1.5, 2.5])) == {0: [0.5, 1.5], 1: [2.5], 2: []}


def test_two_context_ranks_hold_the_outer_and_the_inner_chunks_and_predict_what_follows_them():
    outer, inner = (batch(ParallelLayout(context=2), rank) for rank in (0, 1))
    # Padded to four each: 1 2 3 4 | 6 7 . . | 9 10 . .
    assert outer.tokens_T.tolist() == [1, 4, 6, 0, 9, 0]
    assert inner.tokens_T.tolist() == [2, 3, 7, 0, 10, 0]
    assert outer.predictions.targets_Q.tolist() == [5]
    assert inner.predictions.targets_Q.tolist() == [4, 8]
    assert inner.tokens_T[inner.predictions.sources_U].tolist() == [3, 7]
    assert sorted([*outer.mine_M.tolist(), *inner.mine_M.tolist()]) == [0, 1, 2]
    assert outer.targets_R.tolist() == inner.targets_R.tolist() == [4, 5, 8]


def test_context_ranks_hold_chunks_of_a_prompt_and_of_the_answers_that_share_it():
    rows = [TrainingSample([1, 2, 3, 4, *answer], 4, [1.0] * 4) for answer in ([5, 6, 7, 8], [9, 5, 6, 7])]
    [[pack]] = plan_batches(rows, max_tokens=50)
    outer, inner = (
        laid_out(plan_pack(rows, pack), ParallelLayout(context=2), rank=rank, device=torch.device("cpu"))
        for rank in (0, 1)
    )
    # 1 2 3 4 5 6 7 . | 9 5 6 . : the second answer begins at position 8, behind the tokens at 0 to 3.
    assert outer.tokens_T.tolist() == [1, 2, 7, 0, 9, 0]
    assert inner.tokens_T.tolist() == [3, 4, 5, 6, 5, 6]
    assert outer.sequences.positions_T.tolist() == [0, 1, 6, 7, 4, 7]
    assert [context.tolist() for context in inner.sequences.contexts] == [[], [0, 1, 2, 3]]
    assert [path.tolist() for path in outer.paths] == [[*range(7)], [0, 1, 2, 3, 8, 9, 10]]
    # The prompt's last state predicts both first tokens, and is computed once.
    assert inner.tokens_T[inner.predictions.sources_U].tolist() == [4, 5, 6, 5, 6]
    assert inner.predictions.targets_Q.tolist() == [5, 9, 6, 7, 6, 7]
    assert outer.tokens_T[outer.predictions.sources_U].tolist() == [7, 9]


def test_attention_computes_branches_of_one_shape_in_one_call_whichever_prompt_they_follow():
    answers = ([5, 6, 7, 8], [9, 5, 6, 7], [8, 8, 8, 8])
    rows = [TrainingSample([first, 2, 3, 4, *answer], 4, [1.0] * 4) for first in (1, 11) for answer in answers]
    [[pack]] = plan_batches(rows, max_tokens=50)
    made = laid_out(plan_pack(rows, pack), ParallelLayout(), rank=0, device=torch.device("cpu"))
    # Each prompt with its first answer, seven tokens; then the other answers, three tokens behind four.
    assert [call.count for call in calls_of(made.sequences)] == [2, 4]
    assert made.sequences.lengths == (7, 7, 3, 3, 3, 3)


def test_tensor_ranks_can_cut_every_pack():
    made = batch(ParallelLayout(tensor=4, context=2))
    assert made.sequences.tokens % 16 == 0
    assert len(made.tokens_T) % 4 == 0


def test_a_pack_without_rows_is_one_token_that_nothing_is_asked_of():
    made = laid_out(plan_pack(ROWS, []), ParallelLayout(), rank=0, device=torch.device("cpu"))
    assert (made.plan.members, len(made.tokens_T), len(made.targets_R)) == ([], 1, 0)


@pytest.mark.parametrize(
    "layout", [ParallelLayout(pipeline=2, virtual_pipeline=2), ParallelLayout(context=2), ParallelLayout()]
)
def test_every_rank_gets_as_many_packs_and_every_row_is_in_one(layout: ParallelLayout):
    rows = random_rows(groups=5)
    dealt = shares(rows, layout, max_tokens=30, data=2)
    assert len({len(packs) for packs in dealt}) == 1
    if layout.virtual_pipeline:
        assert len(dealt[0]) % layout.pipeline == 0
    packed = [i for packs in dealt for pack in packs for bundle in pack for i in bundle.rows]
    assert sorted(packed) == list(range(len(rows)))
    assert all(tokens_of(pack) <= 30 * layout.context for packs in dealt for pack in packs)


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tensor=2), ParallelLayout(context=2)], ids=str)
def test_a_row_is_padded_to_what_products_in_fp8_need(layout: ParallelLayout):
    row = packed([5, 40], layout, rank=0, device=torch.device("cpu"), multiple=32)
    assert len(row.index_T) % (32 * layout.tensor) == 0
    assert row.lengths[0] in (5, 8)


def test_a_pack_is_padded_by_a_sequence_that_nothing_attends_to():
    rows = [TrainingSample([1, 2, 3, 4, *answer], 4, [1.0] * 4) for answer in ([5, 6, 7, 8], [9, 5, 6, 7])]
    [[pack]] = plan_batches(rows, max_tokens=50)
    plain, padded = (
        laid_out(plan_pack(rows, pack), ParallelLayout(), rank=0, device=torch.device("cpu"), multiple=multiple)
        for multiple in (5, 16)
    )
    assert plain.sequences.lengths == (7, 3)  # ten tokens, the second answer's behind a context of four
    assert padded.sequences.lengths == (7, 3, 6)
    assert [len(context) for context in padded.sequences.contexts] == [0, 4, 0]
    assert padded.sequences.padding_T.tolist() == [False] * 10 + [True] * 6
    assert padded.tokens_T.tolist() == plain.tokens_T.tolist() + [0] * 6
    assert padded.predictions.sources_U.tolist() == plain.predictions.sources_U.tolist()
