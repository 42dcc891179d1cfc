import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimectl.algorithms.baselines import (
    group_advantages,
    group_normalized,
    has_signal,
    leave_one_out,
    length_weighted,
    mean_normalized,
)
from slimectl.errors import RecordError

rewards_of_samples = st.lists(
    st.tuples(st.floats(-10, 10), st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=12
)


def test_rewards_are_centred_and_divided_by_the_unbiased_standard_deviation():
    advantages_G = group_normalized(torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64))
    # mean 1/2; unbiased variance 4 * (1/2)² / 3 = 1/3; 1/2 / (sqrt(1/3) + 1e-6) = 0.866024
    assert advantages_G.tolist() == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)
    assert advantages_G[0].item() == pytest.approx(0.5 / (math.sqrt(1 / 3) + 1e-6), rel=1e-12)


def test_without_standard_deviation_rewards_are_only_centred():
    assert group_normalized(torch.tensor([3.0, 0.0, 0.0]), std_normalization=False).tolist() == [2.0, -1.0, -1.0]


@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 3, [1.0] * 8])
def test_equal_rewards_give_exact_zeros(rewards):
    assert group_normalized(torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


def test_statistics_go_by_group_id_not_by_position():
    advantages = group_advantages(
        [1.0, 10.0, 3.0, 20.0, 5.0], groups=[7, 2, 7, 2, 4], executions=[0, 1, 2, 3, 4], std_normalization=False
    )
    # group 7: 1, 3 around 2; group 2: 10, 20 around 15; group 4: alone
    assert advantages == [-1.0, -5.0, 1.0, 5.0, 0.0]


def test_samples_of_one_execution_count_once_and_share_the_advantage():
    advantages = group_advantages([1.0, 1.0, 1.0, 0.0], [0, 0, 0, 0], [5, 5, 5, 6], std_normalization=False)
    assert advantages == [0.5, 0.5, 0.5, -0.5]  # attempts 1 and 0 around 1/2, not 1, 1, 1, 0 around 3/4


def test_an_execution_with_unequal_rewards_counts_with_their_mean():
    assert group_advantages([1.0, 0.0, 1.5], [0, 0, 0], [5, 5, 6], std_normalization=False) == [-0.5, -0.5, 0.5]


def test_one_execution_id_in_two_groups_is_two_attempts():
    assert group_advantages([1.0, 3.0, 5.0, 9.0], [0, 0, 1, 1], [0, 1, 0, 1], std_normalization=False) == [-1, 1, -2, 2]


def test_a_reward_that_is_no_number_is_refused_by_position():
    with pytest.raises(ValueError, match=r"rewards\[1\] is nan"):
        group_advantages([1.0, math.nan], [0, 0], [0, 1])
    with pytest.raises(ValueError, match="2 rewards, 1 groups, 2 executions"):
        group_advantages([1.0, 0.0], [0], [0, 1])


@settings(deadline=None)
@given(rewards_of_samples)
def test_advantages_of_the_attempts_of_a_group_sum_to_zero(samples):
    rewards, groups, executions = zip(*samples, strict=True)
    advantages = group_advantages(rewards, groups, executions, std_normalization=False)
    attempts = {(g, e): a for a, g, e in zip(advantages, groups, executions, strict=True)}
    for group in set(groups):
        assert sum(a for (g, _), a in attempts.items() if g == group) == pytest.approx(0, abs=1e-9)


@settings(deadline=None)
@given(rewards_of_samples, st.randoms(use_true_random=False))
def test_permuting_samples_permutes_advantages(samples, random):
    order = random.sample(range(len(samples)), len(samples))
    straight = group_advantages(*zip(*samples, strict=True))
    shuffled = group_advantages(*zip(*[samples[i] for i in order], strict=True))
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-6, abs=1e-6)


@settings(deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.floats(-5, 5))
def test_a_constant_added_to_every_reward_changes_nothing(rewards, shift):
    ids = list(range(len(rewards)))
    plain = group_advantages(rewards, [0] * len(ids), ids, std_normalization=False)
    moved = group_advantages([r + shift for r in rewards], [0] * len(ids), ids, std_normalization=False)
    assert moved == pytest.approx(plain, abs=1e-9)


def test_leaving_one_out_compares_with_the_mean_of_the_others():
    # 6 - (0 + 3) / 2, 0 - (6 + 3) / 2, 3 - (6 + 0) / 2
    assert leave_one_out(torch.tensor([6.0, 0.0, 3.0])).tolist() == [4.5, -4.5, 0.0]
    assert leave_one_out(torch.tensor([5.0])).tolist() == [0.0]


def test_the_length_weighted_baseline_leans_to_the_reward_of_long_answers():
    # baseline (1 * 10 + 0 * 30) / 40
    assert length_weighted(torch.tensor([1.0, 0.0]), torch.tensor([10.0, 30.0])).tolist() == [0.75, -0.25]
    assert length_weighted(torch.tensor([1.0, 0.0]), torch.zeros(2)).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("baseline", ["leave_one_out", "length_weighted"])
def test_fan_out_counts_once_under_every_baseline(baseline):
    advantages = group_advantages(
        [1.0, 0.0, 0.5], [0, 0, 0], [5, 6, 5], baseline=baseline, lengths=[1, 3, 2]
    )  # attempt 5: reward 3/4, length 3; attempt 6: reward 0, length 3
    expected = {"leave_one_out": [0.75, -0.75, 0.75], "length_weighted": [0.375, -0.375, 0.375]}
    assert advantages == pytest.approx(expected[baseline])


def test_a_length_for_each_reward_is_required():
    with pytest.raises(ValueError, match="1 lengths for 2 rewards"):
        group_advantages([1.0, 0.0], [0, 0], [0, 1], baseline="length_weighted", lengths=[3])


def test_rewards_over_their_mean_weigh_rare_success_more():
    rare_G, common_G = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert mean_normalized(rare_G).tolist() == [3.0, -1.0, -1.0, -1.0]  # mean 1/4
    assert mean_normalized(common_G).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])  # mean 3/4
    assert mean_normalized(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(RecordError, match=r"reward -1 is negative, but algorithm\.name maxrl"):
        mean_normalized(torch.tensor([-1.0, 1.0]))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0], (True, "")),
        ([0.25, 0.25 + 1e-5], (True, "")),
        ([1.0, 1.0, 1.0], (False, "zero_std_1.0")),
        ([0, 0], (False, "zero_std_0.0")),
        ([-0.0, 0.0], (False, "zero_std_0.0")),
        ([0.1 + 0.2, 0.3], (False, "zero_std_0.3")),
        ([0.123456] * 2, (False, "zero_std_0.1235")),
        ([0.7], (False, "zero_std_0.7")),
        ([], (False, "empty")),
    ],
)
def test_a_group_has_signal_if_its_rewards_differ(rewards, expected):
    assert has_signal(rewards) == expected
