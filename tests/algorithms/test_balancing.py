"""Loads over ranks: by hand, and never worse than dealing in turns."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slimectl.algorithms.packing import karmarkar_karp, round_robin

loads = st.integers(1, 5).flatmap(
    lambda shares: st.tuples(
        st.integers(0, 6).flatmap(
            lambda each: st.lists(st.integers(0, 100), min_size=each * shares, max_size=each * shares)
        ),
        st.just(shares),
    )
)


def sums(parts: list[list[int]], costs: list[int]) -> list[int]:
    return [sum(costs[i] for i in part) for part in parts]


def test_differencing_by_hand():
    # Neighbours by size: (8, 7), (6, 5), (4, 1) with differences 1, 1 and 3. First (4 | 1) is joined with (8 | 7), the
    # first of those with 1: heavy with light, 4 + 7 = 11 and 1 + 8 = 9. Then 11 with 5 and 9 with 6.
    costs = [8, 7, 6, 5, 4, 1]
    assert sums(karmarkar_karp(costs, 2), costs) == [16, 15]
    assert [sorted(costs[i] for i in part) for part in karmarkar_karp(costs, 2)] == [[4, 5, 7], [1, 6, 8]]


def test_three_shares_of_two_by_hand():
    # (9, 7, 5) and (4, 3, 1): 9 + 1, 7 + 3, 5 + 4
    assert sums(karmarkar_karp([9, 7, 5, 4, 3, 1], 3), [9, 7, 5, 4, 3, 1]) == [10, 10, 9]


def test_turns_are_taken_where_they_are_better():
    # Differencing ends with 42 and 40; in turns it is 6 + 16 + 9 + 10 and 4 + 3 + 14 + 20.
    costs = [6, 4, 16, 3, 9, 14, 10, 20]
    assert karmarkar_karp(costs, 2) == round_robin(8, 2)
    assert sums(round_robin(8, 2), costs) == [41, 41]
    assert karmarkar_karp([], 3) == [[], [], []]


def test_loads_that_cannot_be_dealt_in_equal_numbers_are_refused():
    with pytest.raises(ValueError, match="5 costs cannot be divided into 2 shares"):
        karmarkar_karp([1, 2, 3, 4, 5], 2)


@given(loads)
def test_every_load_is_dealt_once_in_equal_numbers_and_never_worse_than_in_turns(given_loads: tuple[list[int], int]):
    costs, shares = given_loads
    parts = karmarkar_karp(costs, shares)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert {len(part) for part in parts} == {len(costs) // shares}
    assert sums(parts, costs) == sorted(sums(parts, costs), reverse=True)
    assert max(sums(parts, costs)) <= max(sums(round_robin(len(costs), shares), costs))
    assert parts == karmarkar_karp(costs, shares)


@given(st.lists(st.integers(0, 100), min_size=2, max_size=6).filter(lambda costs: len(costs) % 2 == 0))
@example([3, 1, 1, 1, 0, 0])  # 4 where 3 is possible
def test_two_shares_are_within_half_of_the_best(costs: list[int]):
    """The bound of differencing that keeps two shares of equal number: 3/2 (Michiels et al. 2003)."""
    best = min(max(sums([list(order[::2]), list(order[1::2])], costs)) for order in permutations(range(len(costs))))
    assert max(sums(karmarkar_karp(costs, 2), costs)) <= best * 3 / 2 + 1e-9
