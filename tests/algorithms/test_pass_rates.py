from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimectl.algorithms.metrics import majority_at_n, pass_at_k, pass_k_values


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 1) == pytest.approx(1 / 4)
    assert pass_at_k(4, 1, 2) == pytest.approx(1 / 2)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)  # C(7,5)/C(10,5)
    assert (pass_at_k(4, 0, 4), pass_at_k(4, 1, 4), pass_at_k(4, 4, 1)) == (0.0, 1.0, 1.0)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_success(case):
    n, c, k = case
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_more_than_was_drawn_is_refused():
    for n, c, k in [(4, 1, 5), (4, 5, 1), (4, 1, 0)]:
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(n, c, k)


def test_powers_of_two_go_up_to_n():
    assert [pass_k_values(n) for n in (0, 1, 6, 8)] == [[], [1], [1, 2, 4], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("answers", "successes", "expected"),
    [
        (["7", "7", "3"], [True, True, False], 1.0),
        (["3", "3", "7"], [False, False, True], 0.0),
        (["3", "7"], [False, True], 0.5),  # a tie shares the vote
        (["7", None, None], [True, False, False], 1.0),  # no answer is no vote
        ([None, None], [False, False], 0.0),
    ],
)
def test_majority_counts_the_answer_given_most(answers, successes, expected):
    assert majority_at_n(answers, successes) == expected
    assert majority_at_n(answers[::-1], successes[::-1]) == expected


def test_answers_that_are_the_same_vote_together_however_they_are_spelled():
    answers, successes = ["1/2", "3", "0.5", "3", "2/4"], [True, False, True, False, True]
    assert majority_at_n(answers, successes) == 0.0
    assert majority_at_n(answers, successes, lambda a, b: "3" not in (a, b)) == 1.0
