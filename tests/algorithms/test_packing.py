"""Every row once, under the limit, the same on every rank."""

from __future__ import annotations

import random

import pytest

from slimectl.algorithms.packing import Bundle, bundled, dealt, packed, planned, tokens_of
from slimectl.errors import RecordError
from slimectl.types import Row


def row(prompt: list[int], response_length: int, group: int = 0) -> Row:
    return Row(tokens=prompt + [9] * response_length, response_length=response_length, weights=[], group=group)


def alone(tokens: int, i: int = 0) -> Bundle:
    return Bundle((i,), tokens, (1,))


def test_siblings_share_one_copy_of_the_prompt():
    rows = [row([1, 2, 3], 2), row([4, 5, 6], 2, group=1), row([1, 2, 3], 5)]
    assert bundled(rows, max_tokens=100) == [Bundle((0, 2), 3, (2, 5)), Bundle((1,), 3, (2,))]
    assert [bundle.tokens for bundle in bundled(rows, max_tokens=100)] == [3 + 1 + 4, 3 + 1]


def test_equal_prompts_of_different_groups_and_different_prompts_of_one_group_stay_apart():
    assert len(bundled([row([1], 2, group=0), row([1], 2, group=1), row([2], 2, group=0)], max_tokens=100)) == 3


def test_sharing_can_be_refused():
    assert [bundle.rows for bundle in bundled([row([1, 2], 2)] * 3, max_tokens=100, share=False)] == [(0,), (1,), (2,)]


def test_a_family_over_the_limit_is_cut_between_answers():
    bundles = bundled([row([1] * 10, 11), row([1] * 10, 11), row([1] * 10, 11)], max_tokens=30)
    assert [(bundle.rows, bundle.tokens) for bundle in bundles] == [((0, 1), 30), ((2,), 20)]


def test_answers_much_longer_than_their_prompt_do_not_share_it():
    assert [bundle.rows for bundle in bundled([row([1, 2], 9), row([1, 2], 9)], max_tokens=100)] == [(0,), (1,)]
    assert [bundle.rows for bundle in bundled([row([1, 2], 8), row([1, 2], 8)], max_tokens=100)] == [(0, 1)]


def test_first_fit_decreasing_by_hand():
    packs = packed([alone(n) for n in (3, 7, 5, 5, 2, 20)], max_tokens=10)
    assert [[bundle.tokens for bundle in pack] for pack in packs] == [[20], [7, 3], [5, 5], [2]]


def test_the_heaviest_pack_is_split_until_ranks_divide_the_number():
    shares = dealt([[alone(8), alone(4), alone(4)], [alone(5)], [alone(6)]], ranks=2)
    assert [[tokens_of(pack) for pack in share] for share in shares] == [[8, 6], [8, 5]]


def test_a_lone_bundle_is_split_between_its_answers():
    shares = dealt([[Bundle((0, 1, 2), 4, (5, 3, 3))]], ranks=2)
    assert shares == [[[Bundle((0,), 4, (5,))]], [[Bundle((1, 2), 4, (3, 3))]]]


def test_a_single_row_leaves_the_other_rank_an_empty_pack():
    assert dealt([[alone(4)]], ranks=2) == [[[alone(4)]], [[]]]
    assert dealt([], ranks=2) == [[], []]


def test_a_row_without_a_prompt_is_refused():
    with pytest.raises(RecordError, match="row 1: 2 tokens with a response of 2"):
        bundled([row([1], 1), row([], 2)], max_tokens=10)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_in_exactly_one_pack_and_packs_keep_the_limit(seed: int):
    draw = random.Random(seed)
    rows = [row([group] * draw.randint(1, 9), draw.randint(0, 12), group) for group in range(7) for _ in range(4)]
    ranks, max_tokens = draw.randint(1, 4), draw.randint(5, 40)
    shares = planned(rows, max_tokens=max_tokens, ranks=ranks)
    assert len({len(share) for share in shares}) == 1
    packs = [pack for share in shares for pack in share]
    assert sorted(i for pack in packs for bundle in pack for i in bundle.rows) == list(range(len(rows)))
    for pack in packs:
        assert tokens_of(pack) <= max_tokens or (len(pack) == 1 and len(pack[0].rows) == 1)
    assert shares == planned(rows, max_tokens=max_tokens, ranks=ranks)
