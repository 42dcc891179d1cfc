"""Tokens that rows begin with are in a trie once; packs of any limit hold every row and no row's tokens change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimectl.algorithms import packing
from slimectl.algorithms.packing import PrefixTrie, build_tries, first_fit
from slimectl.errors import RecordError
from slimectl.types import TrainingSample


def row(prompt: list[int], response: list[int], group: int = 0) -> TrainingSample:
    return TrainingSample([*prompt, *response], len(response), [], group=group)


PROMPT = [1, 2, 3, 4, 5, 6]


def test_the_first_bin_with_room_is_taken_and_a_large_one_stands_alone():
    assert first_fit([6, 5, 12, 4, 5, 1], room=10) == [[0, 3], [1, 4], [2], [5]]


def test_siblings_share_one_copy_of_the_prompt():
    rows = [row(PROMPT, [8, 0]), row([4, 5, 6], [9, 0], 1), row(PROMPT, [9, 9, 9, 0])]
    tries = build_tries(rows, max_tokens=100)
    assert tries == [PrefixTrie((0, 2), (7, 9), (0, 6)), PrefixTrie((1,), (4,), (0,))]
    assert [trie.tokens for trie in tries] == [6 + 1 + 3, 3 + 1]


def test_equal_prompts_of_different_groups_are_computed_once_too():
    [trie] = build_tries([row(PROMPT, [8, 0]), row(PROMPT, [9, 0], 1)], max_tokens=100)
    assert trie.tokens == 6 + 1 + 1


def test_turns_of_an_episode_and_forks_within_an_answer_share_all_that_came_before():
    first = row(PROMPT, [7, 7, 7, 0])
    second = row([*first.tokens, 5, 5], [8, 8, 0])  # goes on from the whole first turn
    fork = row([*first.tokens[:8], 9, 9], [4, 0])  # leaves the answer after its second token
    [trie] = build_tries([fork, second, first], max_tokens=100)
    assert trie == PrefixTrie((2, 1, 0), (9, 14, 11), (0, 9, 8))
    assert trie.tokens == 14 + 3


def test_equal_rows_are_computed_once():
    assert [trie.tokens for trie in build_tries([row(PROMPT, [1, 2])] * 3, max_tokens=100)] == [7]


def test_tokens_with_other_marks_are_not_shared():
    rows = [row(PROMPT, [8, 0])] * 3
    marks = [np.array([5] * 7), np.array([5] * 4 + [2**40] * 3), np.array([5] * 4 + [2**40] * 3)]
    [trie] = build_tries(rows, max_tokens=100, marks=[each.astype(np.uint64) for each in marks])
    assert trie == PrefixTrie((0, 1, 2), (7, 7, 7), (0, 4, 7))


def test_sharing_can_be_refused():
    tries = build_tries([row([1, 2], [9, 9])] * 3, max_tokens=100, share=False)
    assert [trie.rows for trie in tries] == [(0,), (1,), (2,)]


def test_a_trie_over_the_limit_is_cut_between_branches_with_a_copy_of_the_prompt():
    answers = [[answer] * 11 for answer in (21, 22, 23)]
    tries = build_tries([row([1] * 10, answer) for answer in answers], max_tokens=30)
    assert [(trie.rows, trie.tokens) for trie in tries] == [((0, 1), 30), ((2,), 20)]


def test_a_fork_that_saves_next_to_nothing_is_not_taken():
    long, longer = ([row([1, 2], [answer] * length) for answer in (8, 9)] for length in (32, 34))
    assert [trie.rows for trie in build_tries(long, max_tokens=100)] == [(0, 1)]
    assert [trie.rows for trie in build_tries(longer, max_tokens=100)] == [(0,), (1,)]


def test_a_row_without_a_prompt_is_refused():
    with pytest.raises(RecordError, match="row 1: 2 tokens with a response of 2"):
        build_tries([row([1], [2]), row([], [2, 3])], max_tokens=10)


def test_pairs_are_what_attention_looks_at():
    # A prompt of 3: 1 + 2 + 3; the answers' computed tokens, 1 and 2, see it and what is before: 4, and 4 + 5.
    assert PrefixTrie((0, 1), (4, 5), (0, 3)).pairs == 6 + 4 + 9


def test_halves_copy_what_both_need():
    trie = PrefixTrie((0, 1, 2, 3), (10, 12, 9, 11), (0, 8, 3, 8))  # 17 tokens; the two branches have 3 in common
    assert trie.tokens == 10 + 4 + 6 + 3
    assert trie.halves() == (PrefixTrie((0, 1), (10, 12), (0, 8)), PrefixTrie((2, 3), (9, 11), (0, 8)))


branches = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 9), st.lists(st.integers(0, 2), max_size=6)), max_size=9
)
"""Of every row: an earlier one, how many of its tokens it begins with, and the tokens that follow."""


def rows_of(drawn: list[tuple[int, int, list[int]]]) -> list[TrainingSample]:
    sequences = [[0, 1, 2, 1]]
    for parent, kept, tokens in drawn:
        sequences.append(sequences[parent % len(sequences)][: kept + 1] + tokens)
    return [TrainingSample(tokens, len(tokens) // 2, []) for tokens in sequences]


@given(branches, st.integers(3, 40), st.booleans())
def test_any_rows_share_all_that_they_can_and_tries_keep_the_limit(
    drawn: list[tuple[int, int, list[int]]], max_tokens: int, limited: bool
):
    rows = rows_of(drawn)
    saving, packing.LEAST_SAVING = packing.LEAST_SAVING, 0
    try:
        tries = build_tries(rows, max_tokens=max_tokens if limited else 10_000)
    finally:
        packing.LEAST_SAVING = saving
    assert sorted(i for trie in tries for i in trie.rows) == list(range(len(rows)))
    for trie in tries:
        inputs = [rows[i].tokens[: rows[i].input_length] for i in trie.rows]
        for before, after, shared in zip(inputs, inputs[1:], trie.shared[1:], strict=False):
            assert before[:shared] == after[:shared]
        assert not limited or trie.tokens <= max_tokens or len(trie.rows) == 1
        prefixes = {tuple(tokens[:end]) for tokens in inputs for end in range(1, len(tokens) + 1)}
        assert trie.tokens == len(prefixes)
    if not limited:
        inputs = [row.tokens[: row.input_length] for row in rows]
        assert sum(trie.tokens for trie in tries) == len(
            {tuple(tokens[:end]) for tokens in inputs for end in range(1, len(tokens) + 1)}
        )
