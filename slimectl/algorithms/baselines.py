"""Group baselines: compares the rewards of responses to the same prompt.

G attempts of one group
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from slimectl.algorithms.normalization import STD_EPSILON, RewardMoments, normalized
from slimectl.errors import RecordError
from slimectl.settings.needs import AlgorithmSection, Baseline
from slimectl.types import Sample

SPREAD_EPSILON = 1e-6


def has_signal(rewards: Sequence[float | None]) -> tuple[bool, str]:
    """Return whether the rewards of one group differ. If not, also return the reason, with their common value.

    >>> has_signal([1.0, 0.0]), has_signal([1.0, 1.0])
    ((True, ''), (False, 'zero_std_1.0'))

    DAPO's dynamic sampling, arXiv:2503.14476, eq. 11: a group without spread has no gradient. Differences up to 1e-6
    count as rounding. A group of one has no spread. None means no opinion and is not compared. A group without a reward
    gives the reason "empty".
    """
    numbers = [reward for reward in rewards if reward is not None]
    if not numbers:
        return False, "empty"
    if max(numbers) - min(numbers) > SPREAD_EPSILON:
        return True, ""
    return False, f"zero_std_{round(numbers[0] + 0.0, 4)}"


def normalize_rewards(
    samples: Sequence[Sample],
    rewards: Sequence[float],
    algorithm: AlgorithmSection,
    running: RewardMoments | None = None,
) -> list[float]:
    """Return the rewards compared within their groups by the algorithm's baseline, or unchanged without a baseline.

    With `norm_kinds`, return them normalized by these kinds of mean and std instead. `running` has the moments of all
    rounds.
    """
    if (kinds := algorithm.norm_kinds) is not None:
        attempts = attempt_rewards(samples, rewards)
        groups = [group for group, _ in attempts]
        values = normalized(list(attempts.values()), groups, kinds, running or RewardMoments())
        by_attempt = dict(zip(attempts, values, strict=True))
        return [by_attempt[sample.group_index, sample.trajectory_id] for sample in samples]
    if algorithm.baseline == "none":
        return list(rewards)
    return group_advantages(
        rewards,
        [sample.group_index for sample in samples],
        [sample.trajectory_id for sample in samples],
        baseline=algorithm.baseline,
        std_normalization=algorithm.std_normalization,
        # Count masked-out samples as well: a removed sample still contributes to the statistics.
        lengths=[sum(sample.loss_mask or [1] * sample.response_length) for sample in samples],
    )


def attempt_rewards(samples: Sequence[Sample], rewards: Sequence[float]) -> dict[tuple[int, int], float]:
    """Return the reward of every attempt by (group, attempt): the mean over its samples."""
    attempts: dict[tuple[int, int], list[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        attempts.setdefault((sample.group_index, sample.trajectory_id), []).append(reward)
    return {attempt: fmean(members) for attempt, members in attempts.items()}


def group_normalized(rewards_G: Tensor, *, std_normalization: bool = True) -> Tensor:
    """Return the rewards of one group, centered on their mean and divided by their standard deviation. [G] to [G].

    Shao et al. 2024, arXiv:2402.03300, section 4.1.2: (r - mean(r)) / (std(r) + 1e-6), the unbiased std. Without
    `std_normalization` they are only centered (Dr. GRPO, arXiv:2503.20783). Equal rewards, and a group of one, give
    exact zeros. Otherwise the rounding error of their mean would be divided by 1e-6.
    """
    if rewards_G.numel() == 0 or bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (rewards_G.std() + STD_EPSILON) if std_normalization else centred_G


def leave_one_out(rewards_G: Tensor) -> Tensor:
    """Return each reward minus the mean of the others in its group. [G] to [G].

    RLOO, Ahmadian et al. 2024, arXiv:2402.14740: r_i - mean(r_j, j != i). Equal rewards, and a group of one, give exact
    zeros.
    """
    count = rewards_G.numel()
    if count == 0 or bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)
    return rewards_G - (rewards_G.sum() - rewards_G) / (count - 1)


def length_weighted(rewards_G: Tensor, lengths_G: Tensor) -> Tensor:
    """Return each reward minus sum(length reward) / sum(length) of its group. [G], [G] to [G].

    OPO, Hao et al. 2025, arXiv:2505.23585: the minimum-variance baseline if the squared gradient of a sequence grows
    with its length. Equal rewards give exact zeros. If all lengths are 0, the plain mean is used.
    """
    if rewards_G.numel() == 0 or bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)
    weights_G = lengths_G if bool(lengths_G.any()) else torch.ones_like(rewards_G)
    return rewards_G - (weights_G * rewards_G).sum() / weights_G.sum()


def mean_normalized(rewards_G: Tensor) -> Tensor:
    """Return (r - mean) / mean of one group, for nonnegative rewards. [G] to [G].

    MaxRL, Tajwar et al. 2026, arXiv:2602.02710: over groups of n this is the gradient of the log-likelihood of a
    correct response, expanded to pass@n. Equal rewards, and a group without a correct response, give exact zeros.
    Raises RecordError on a negative reward.
    """
    if rewards_G.numel() == 0 or bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)
    if bool((rewards_G < 0).any()):
        raise RecordError(
            f"reward {float(rewards_G.min()):g} is negative, but algorithm.name maxrl needs rewards >= 0. Use grpo."
        )
    return (rewards_G - rewards_G.mean()) / rewards_G.mean()


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[int],
    executions: Sequence[int],
    *,
    baseline: Baseline = "group_mean",
    std_normalization: bool = True,
    lengths: Sequence[int] = (),
) -> list[float]:
    """Return the advantage of every sample within its group, in input order. All sequences have one length.

    >>> group_advantages([1.0, 7.0, 3.0], groups=[0, 9, 0], executions=[0, 1, 2], std_normalization=False)
    [-1.0, 0.0, 1.0]

    A group is all samples with the same id, in any order and number. Samples of one execution (fan-out) are one
    attempt: it counts once, with their mean reward and total length, and they share its advantage.
    `std_normalization` applies to group_mean. Only length_weighted reads `lengths`, in trained tokens.

    Raises ValueError if the lengths differ or a reward is not finite.
    """
    if not len(rewards) == len(groups) == len(executions):
        raise ValueError(f"{len(rewards)} rewards, {len(groups)} groups, {len(executions)} executions: must be equal")
    if baseline == "length_weighted" and len(lengths) != len(rewards):
        raise ValueError(f"{len(lengths)} lengths for {len(rewards)} rewards")
    attempts: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for position, (reward, group, execution) in enumerate(zip(rewards, groups, executions, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(f"rewards[{position}] is {reward}, which is not finite")
        attempts[group][execution].append(position)
    advantages: dict[tuple[int, int], float] = {}
    for group, by_execution in attempts.items():
        rewards_G = _per_attempt([fmean(float(rewards[i]) for i in members) for members in by_execution.values()])
        if baseline == "leave_one_out":
            advantages_G = leave_one_out(rewards_G)
        elif baseline == "length_weighted":
            lengths_G = _per_attempt([sum(lengths[i] for i in members) for members in by_execution.values()])
            advantages_G = length_weighted(rewards_G, lengths_G)
        elif baseline == "mean_normalized":
            advantages_G = mean_normalized(rewards_G)
        else:
            advantages_G = group_normalized(rewards_G, std_normalization=std_normalization)
        for execution, advantage in zip(by_execution, advantages_G.tolist(), strict=True):
            advantages[group, execution] = advantage
    return [advantages[key] for key in zip(groups, executions, strict=True)]


def decoupled_advantages(
    components: Mapping[str, Sequence[float | None]],
    weights: Mapping[str, float],
    groups: Sequence[int],
    executions: Sequence[int],
) -> list[float]:
    """Return the advantage of every sample from components of its reward that are normalized separately.

    GDPO, Liu et al. 2026, arXiv:2601.05242: each component is centered in its group and divided by its standard
    deviation there. The weighted sums are centered and scaled to a standard deviation of 1 over the whole batch.

    `components` has a value per sample by name. None is a part without an opinion: its sample is not compared in this
    component. Attempts count once, in groups and in the batch, as in `group_advantages`. Equal sums give exact zeros.
    """
    attempts = list(zip(groups, executions, strict=True))
    sums = dict.fromkeys(attempts, 0.0)
    for name, weight in weights.items():
        pairs = zip(attempts, components[name], strict=True)
        rated = [(attempt, value) for attempt, value in pairs if value is not None]
        advantages = group_advantages(
            [value for _, value in rated],
            [group for (group, _), _ in rated],
            [execution for (_, execution), _ in rated],
        )
        shares = {attempt: advantage for (attempt, _), advantage in zip(rated, advantages, strict=True)}
        for attempt, share in shares.items():
            sums[attempt] += weight * share
    whitened = dict(zip(sums, group_normalized(_per_attempt(list(sums.values()))).tolist(), strict=True))
    return [whitened[attempt] for attempt in attempts]


def _per_attempt(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
