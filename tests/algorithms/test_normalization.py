"""Normalization of rewards by group, batch and running statistics, and bounds of rewards and advantages."""

from __future__ import annotations

import math
import statistics

import pytest
from stages.passes import training_batch

from slimectl.algorithms.baselines import attempt_rewards
from slimectl.algorithms.normalization import RewardMoments, clamped, moments_of, normalized, share_beyond
from slimectl.settings import Settings
from slimectl.settings.needs import Need
from slimectl.stages.filters import mask_samples
from slimectl.types import Sample, Status

REWARDS, GROUPS = [1.0, 0.0, 4.0, 3.0], [0, 0, 1, 1]
EPSILON = 1e-6


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        # group means 1/2 and 7/2, batch mean 2; group stds sqrt(1/2), batch std sqrt(10/3)
        (("group", "off"), [0.5, -0.5, 0.5, -0.5]),
        (("batch", "off"), [-1.0, -2.0, 2.0, 1.0]),
        (("running", "off"), [-9.0, -10.0, -6.0, -7.0]),
        (("off", "running"), [0.5 / (1 + EPSILON / 2), 0.0, 2.0 / (1 + EPSILON / 2), 1.5 / (1 + EPSILON / 2)]),
        (("group", "batch"), [x / (math.sqrt(10 / 3) + EPSILON) for x in (0.5, -0.5, 0.5, -0.5)]),
        (("batch", "group"), [x / (math.sqrt(1 / 2) + EPSILON) for x in (-1.0, -2.0, 2.0, 1.0)]),
    ],
)
def test_mean_and_std_come_from_the_named_populations(kinds, expected):
    running = RewardMoments(count=5, mean=10.0, squares=16.0)  # std sqrt(16 / 4) = 2
    assert normalized(REWARDS, GROUPS, kinds, running) == pytest.approx(expected, rel=1e-12)


def test_equal_rewards_are_centred_exactly_and_not_divided():
    assert normalized([0.1] * 3, [0] * 3, ("group", "group"), RewardMoments()) == [0.0] * 3
    # group 0 is equal: 1 - 2/3 of the batch stays undivided
    values = normalized([1.0, 1.0, 0.0], [0, 0, 1], ("batch", "group"), RewardMoments())
    assert values == pytest.approx([1 / 3, 1 / 3, -2 / 3], rel=1e-12)


def test_running_moments_of_many_rounds_are_those_of_all_rewards():
    rounds = [[0.25, 1.0], [3.0], [], [-2.0, 0.5, 0.5]]
    moments, together = RewardMoments(), [reward for each in rounds for reward in each]
    for each in rounds:
        moments.add(each)
    assert moments.count == 6
    assert moments.mean == pytest.approx(statistics.fmean(together), rel=1e-14)
    assert moments.std == pytest.approx(statistics.stdev(together), rel=1e-14)


def test_values_beyond_a_bound_are_moved_to_it_and_counted():
    values = [-3.0, -2.0, 0.5, 2.5]
    assert clamped(values, 2.0) == [-2.0, -2.0, 0.5, 2.0]
    assert clamped(values, None) == values
    assert share_beyond(values, 2.0) == 0.5
    assert share_beyond([], 2.0) == 0.0


def test_samples_of_one_attempt_count_once_in_every_population():
    parts = [Sample(0, 0, rollout_id=7), Sample(0, 1, rollout_id=7), Sample(0, 2)]
    attempts = attempt_rewards(parts, [1.0, 2.0, 4.5])
    assert attempts == {(0, 7): 1.5, (0, 2): 4.5}
    assert moments_of(list(attempts.values())) == RewardMoments(count=2, mean=3.0, squares=4.5)
    values, _ = advantages_of(parts, [1.0, 2.0, 4.5])
    assert values == [-1.5, -1.5, 1.5]


def advantages_of(parts: list[Sample], rewards: list[float]) -> tuple[list[float], dict[str, float]]:
    for sample, reward in zip(parts, rewards, strict=True):
        sample.reward, sample.tokens, sample.response_length = reward, [1, 2], 1
    batch, metrics = training_batch(parts, algorithm("grpo", norm_mean_type="running", norm_std_type="off"))
    return [row.advantages[0] for row in batch.rows], metrics


def algorithm(name: str, **changes: object):
    return Settings.model_validate({"algorithm": {"name": name, **changes}}).algorithm


def samples(*rewards: float, lengths: tuple[int, ...] = ()) -> list[Sample]:
    """Two responses per group."""
    lengths = lengths or (2,) * len(rewards)
    return [
        Sample(i // 2, i, tokens=[1] * (2 + n), response_length=n, reward=reward, status=Status.COMPLETED)
        for i, (reward, n) in enumerate(zip(rewards, lengths, strict=True))
    ]


def advantages(name: str, *rewards: float, **changes: object) -> tuple[list[float], dict[str, float]]:
    """The advantage of each response's first token, and the metrics."""
    batch, metrics = training_batch(samples(*rewards), algorithm(name, **changes))
    return [row.advantages[0] for row in batch.rows], metrics


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "cispo", "sapo", "gmpo", "dapo", "topr"])
def test_the_kinds_replace_the_comparison_of_every_group_algorithm(name):
    assert advantages(name, 1.0, 0.0, 4.0, 3.0, norm_mean_type="batch")[0] == [-1.0, -2.0, 2.0, 1.0]


def test_returns_of_reinforce_plus_plus_start_from_the_normalized_reward():
    settings = algorithm("reinforce_plus_plus", norm_mean_type="batch", gamma=0.5)
    batch, _ = training_batch(samples(1.0, 0.0, 4.0, 3.0), settings)
    # rewards -1, -2, 2, 1; with gamma 1/2 the returns of two tokens are r/2 and r: mean 0, unbiased variance
    # (1 + 4 + 4 + 1) (1 + 1/4) / 7
    scale = math.sqrt(12.5 / 7 + 1e-8)
    expected = [[r / 2 / scale, r / scale] for r in (-1.0, -2.0, 2.0, 1.0)]
    assert [row.advantages for row in batch.rows] == [pytest.approx(each, rel=1e-12) for each in expected]


def test_groups_are_needed_only_for_statistics_of_groups():
    assert Need.GROUPS not in algorithm("grpo", norm_mean_type="batch").needs
    assert Need.GROUPS in algorithm("ppo", norm_std_type="group").needs


def test_rewards_are_bounded_after_they_are_compared():
    values, metrics = advantages("dr_grpo", 1.0, 0.0, 4.0, 0.0, reward_clip=1.5)
    assert values == [0.5, -0.5, 1.5, -1.5]  # compared: 2 and -2
    assert metrics["rollout/reward_clip_frac"] == 0.5


def test_a_penalized_reward_is_bounded_too():
    # Old log-probabilities are -1, those of the reference -2: a divergence of 2 tokens x 1 from both.
    made = samples(4.0, 0.0)
    made[0].ref_log_probs, made[1].ref_log_probs = [-2.0, -2.0], [-1.0, -1.0]
    batch, _ = training_batch(made, algorithm("dr_grpo", kl_coef=0.5, reward_clip=1.2))
    assert [row.advantages for row in batch.rows] == [[1.2, 1.2], [-1.2, -1.2]]  # 3 and 0, around 1.5


def test_advantages_are_bounded_after_whitening():
    values, metrics = advantages("reinforce_plus_plus", 1.0, 0.0, 0.0, 0.0, advantage_clip=1.0)
    # whitened: (3/4 and -1/4) / sqrt(3 / 14): 1.62 and -0.54
    assert values == pytest.approx([1.0, *[-0.25 / math.sqrt(3 / 14)] * 3], rel=1e-6)
    assert metrics["rollout/advantage_clip_frac"] == 0.25


def test_truncated_responses_count_in_the_baseline_and_are_not_trained_on():
    made = samples(1.0, 0.0)
    made[1].status = Status.TRUNCATED
    batch, metrics = training_batch(made, algorithm("dr_grpo"))
    masked, counted = masked_batch(made, max_len_mask=True)
    assert [row.advantages for row in masked.rows] == [row.advantages for row in batch.rows]
    assert [row.loss_weights for row in masked.rows] == [[1.0, 1.0], [0.0, 0.0]]
    assert counted == {"rollout/masked/max_len": 0.5}
    assert not any(name.startswith("rollout/masked") for name in metrics)


def masked_batch(made: list[Sample], **changes: object):
    settings = algorithm("dr_grpo", **changes)
    batch, _ = training_batch(made, settings)
    return batch, mask_samples(batch, settings, 1.0)


def test_groups_outside_the_thresholds_are_not_trained_on():
    made = samples(1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    batch, metrics = masked_batch(made, difficulty_mask=True, difficulty_low_threshold=0.0)
    assert [bool(sum(row.loss_weights)) for row in batch.rows] == [False, False, True, True, False, False]
    assert metrics == {"rollout/masked/difficulty": 2 / 3}


def test_a_single_response_does_not_tell_the_difficulty():
    batch, metrics = masked_batch([*samples(1.0, 0.0), Sample(9, 9, tokens=[1, 1], response_length=1, reward=1.0)],
                                  difficulty_mask=True)  # fmt: skip
    assert [sum(row.loss_weights) for row in batch.rows] == [2.0, 2.0, 1.0]
    assert metrics == {"rollout/masked/difficulty": 0.0}


def test_long_wrong_responses_are_not_trained_on():
    batch, metrics = masked_batch(samples(0.0, 0.0, 1.0, 0.5, lengths=(3, 4, 4, 5)), error_max_len_threshold=4)
    assert [bool(sum(row.loss_weights)) for row in batch.rows] == [True, False, True, False]
    assert metrics == {"rollout/masked/error_len": 0.5}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("opd", {"reward_clip": 1.0}, "algorithm.reward_clip has no effect with algorithm.name opd"),
        ("grpo", {"difficulty_mask": True, "difficulty_low_threshold": 0.95}, "0.95 is not below"),
    ],
)
def test_conflicts_are_named(name, changes, words):
    assert words in next(algorithm(name, **changes).conflicts(temperature=1.0))
