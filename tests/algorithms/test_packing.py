"""Every row once, under the limit, the same on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from slimectl.algorithms.packing import (
    BatchingOptions,
    PrefixTrie,
    assign_to_ranks,
    build_tries,
    pack,
    pack_by_length,
    plan_batches,
    tokens_of,
)
from slimectl.types import TrainingSample


def row(prompt: list[int], response_length: int, group: int = 0) -> TrainingSample:
    return TrainingSample(
        tokens=prompt + [9] * response_length, response_length=response_length, loss_weights=[], group=group
    )


def alone(tokens: int, i: int = 0) -> PrefixTrie:
    return PrefixTrie((i,), (tokens,), (0,))


def test_first_fit_decreasing_by_hand():
    packs = pack([alone(n) for n in (3, 7, 5, 5, 2, 20)], max_tokens=10)
    assert [[bundle.tokens for bundle in pack] for pack in packs] == [[20], [7, 3], [5, 5], [2]]


def test_the_heaviest_pack_is_split_until_ranks_divide_the_number():
    shares = assign_to_ranks([[alone(8), alone(4), alone(4)], [alone(5)], [alone(6)]], ranks=2)
    assert [[tokens_of(pack) for pack in share] for share in shares] == [[8, 6], [8, 5]]


def test_a_lone_trie_is_split_between_its_rows():
    shares = assign_to_ranks([[PrefixTrie((0, 1, 2), (8, 6, 6), (0, 4, 4))]], ranks=2)
    assert shares == [[[PrefixTrie((0,), (8,), (0,))]], [[PrefixTrie((1, 2), (6, 6), (0, 4))]]]


def test_a_single_row_leaves_the_other_rank_an_empty_pack():
    assert assign_to_ranks([[alone(4)]], ranks=2) == [[[alone(4)]], [[]]]
    assert assign_to_ranks([], ranks=2) == [[], []]


def test_long_answers_weigh_more_by_flops_than_by_tokens():
    # Tokens 10, 5, 7 and 6; with a pair as dear as a token 10 + 55, 5 + 15, 7 + 7 and 6 + 6.
    packs = [[alone(10)], [alone(5)], [alone(1)] * 7, [alone(1)] * 6]
    by_flops = BatchingOptions(balance="flops", pair_cost=1.0)
    assert [by_flops.cost(pack) for pack in packs] == [65, 20, 14, 12]
    shares = {kind: assign_to_ranks(packs, ranks=2, batching=replace(by_flops, balance=kind)) for kind in KINDS}
    assert {kind: [list(map(tokens_of, share)) for share in dealt] for kind, dealt in shares.items()} == {
        "tokens": [[10, 5], [7, 6]],
        "flops": [[10, 6], [5, 7]],
        "none": [[10, 7], [6, 5]],
    }


def test_padded_packs_have_rows_of_similar_length():
    packs = pack_by_length([alone(n, i) for i, n in enumerate((3, 9, 4, 8, 20))], max_tokens=18)
    assert [[bundle.tokens for bundle in pack] for pack in packs] == [[20], [9, 8], [4, 3]]
    padded = BatchingOptions(padded=True)
    assert [padded.cost(pack) for pack in packs] == [20, 18, 8]
    shares = assign_to_ranks(packs[1:], ranks=2, batching=padded)
    assert [[padded.cost(pack) for pack in share] for share in shares] == [[18], [8]]
    assert assign_to_ranks([[alone(9), alone(3), alone(8)]], ranks=2, batching=padded) == [
        [[alone(8), alone(3)]], [[alone(9)]]
    ]  # fmt: skip


def test_padded_packs_share_no_prefixes_and_hold_every_row_once():
    rows = [row([1, 2, 3, 4], length) for length in (3, 2, 9, 3)]
    [packs] = plan_batches(rows, max_tokens=14, batching=BatchingOptions(padded=True))
    assert [[trie.rows for trie in pack] for pack in packs] == [[(2,)], [(0,), (3,)], [(1,)]]
    assert [tokens_of(pack) for pack in packs] == [12, 12, 5]


def test_micro_batches_of_a_fixed_number_of_rows_keep_the_order():
    rows = [row([1, 2], length) for length in (9, 1, 9, 1, 2)]
    [packs] = plan_batches(rows, max_tokens=4, batching=BatchingOptions(micro_batch_size=2))
    assert [[trie.rows for trie in pack] for pack in packs] == [[(1, 0)], [(3, 2)], [(4,)]]
    [packs] = plan_batches(rows, max_tokens=4, batching=BatchingOptions(micro_batch_size=2), share=False)
    assert [[trie.rows for trie in pack] for pack in packs] == [[(0,), (1,)], [(2,), (3,)], [(4,)]]
    first, second = plan_batches(rows, max_tokens=4, ranks=2, batching=BatchingOptions(micro_batch_size=2))
    assert [len(share) for share in (first, second)] == [2, 2]


KINDS = ("tokens", "flops", "none")
batches = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.integers(0, 30)), max_size=25)
"""(group, prompt length, response length) of each row."""
batchings = st.builds(
    BatchingOptions,
    st.none() | st.integers(1, 4),
    st.sampled_from(KINDS),
    st.floats(0, 1).map(lambda cost: round(cost, 3)),
)


@given(batches, batchings, st.integers(1, 4), st.integers(5, 60), st.booleans())
def test_every_row_is_in_one_pack_packs_keep_the_limit_and_ranks_get_as_many(
    sizes: list[tuple[int, int, int]], batching: BatchingOptions, ranks: int, max_tokens: int, share: bool
):
    rows = [row([group] * prompt, response, group) for group, prompt, response in sizes]
    shares = plan_batches(rows, max_tokens=max_tokens, ranks=ranks, share=share, batching=batching)
    assert len(shares) == ranks
    assert len({len(packs) for packs in shares}) == 1
    packs = [members for packs in shares for members in packs]
    assert sorted(i for bundles in packs for bundle in bundles for i in bundle.rows) == list(range(len(rows)))
    for bundles in packs:
        members = sum(len(bundle.rows) for bundle in bundles)
        if batching.micro_batch_size is not None:
            assert members <= batching.micro_batch_size
        else:  # an oversize row travels alone
            assert tokens_of(bundles) <= max_tokens or members == 1
    assert shares == plan_batches(rows, max_tokens=max_tokens, ranks=ranks, share=share, batching=batching)


@given(batches, st.sampled_from(KINDS[:2]), st.integers(1, 4))
def test_balanced_shares_are_never_heavier_than_those_dealt_in_turns(
    sizes: list[tuple[int, int, int]], kind: Literal["tokens", "flops"], ranks: int
):
    rows = [row([group] * prompt, response, group) for group, prompt, response in sizes]
    balanced, plain = (
        BatchingOptions(balance=kind, pair_cost=0.25),
        replace(BatchingOptions(pair_cost=0.25), balance="none"),
    )
    packs = pack(build_tries(rows, max_tokens=40), max_tokens=40)
    while len(packs) % ranks:
        packs.append([])  # so that both deal the same packs
    heaviest = [
        max(sum(map(balanced.cost, share)) for share in assign_to_ranks(packs, ranks=ranks, batching=batching))
        for batching in (balanced, plain)
    ]
    assert heaviest[0] <= heaviest[1] + 1e-9


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_first_fit_opens_a_pack_only_where_no_earlier_one_has_room(tokens: list[int], max_tokens: int):
    packs = pack([alone(n, i) for i, n in enumerate(tokens)], max_tokens=max_tokens)
    for later in range(1, len(packs)):
        first = packs[later][0].tokens
        assert all(tokens_of(earlier) + first > max_tokens for earlier in packs[:later])
    assert len(packs) <= len(tokens)
