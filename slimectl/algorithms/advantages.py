"""Token-level rewards, discounted returns and whitening over a batch.

T tokens
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from slimectl.errors import RecordError
from slimectl.settings.needs import Baseline

SPREAD_EPSILON = 1e-6


def has_signal(rewards: Sequence[float]) -> tuple[bool, str]:
    """Return whether the rewards of one group differ, and if not the reason, which names their common value.

    >>> has_signal([1.0, 0.0]), has_signal([1.0, 1.0])
    ((True, ''), (False, 'zero_std_1.0'))

    DAPO's dynamic sampling, arXiv:2503.14476, eq. 11: a group without spread has no gradient. Differences up to 1e-6
    count as rounding. A group of one has no spread; an empty group is "empty".
    """
    if not rewards:
        return False, "empty"
    if max(rewards) - min(rewards) > SPREAD_EPSILON:
        return True, ""
    return False, f"zero_std_{round(rewards[0] + 0.0, 4)}"


VARIANCE_EPSILON = 1e-8


def discounted(rewards_T: Tensor, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma G_{t+1}, with 0 after the last token; [T] to [T]. Sutton & Barto 2018, eq. 3.9."""
    returns_T = torch.empty_like(rewards_T)
    following = rewards_T.new_zeros(())
    for t in range(len(rewards_T) - 1, -1, -1):
        following = rewards_T[t] + gamma * following
        returns_T[t] = following
    return returns_T


def sequence_rewards(reward: float, kl_T: Tensor | None, mask_T: Tensor, *, kl_coef: float) -> Tensor:
    """Return the reward of every token of one answer, [T]: -kl_coef kl, plus `reward` at the last unmasked token.

    Ouyang et al. 2022, arXiv:2203.02155, eq. 2, token by token. A wholly masked answer gives zeros.
    """
    rewards_T = torch.zeros_like(mask_T) if kl_T is None else -kl_coef * kl_T * mask_T
    positions = mask_T.nonzero()
    if not len(positions):
        return torch.zeros_like(mask_T)
    rewards_T[positions[-1]] += reward
    return rewards_T


def reinforce_returns(reward: float, kl_T: Tensor | None, mask_T: Tensor, *, kl_coef: float, gamma: float) -> Tensor:
    """Return the discounted returns of one answer, [T]; zero where masked.

    REINFORCE++, Hu et al. 2025, arXiv:2501.03262: the returns of `sequence_rewards`. Actions are the unmasked tokens:
    what a tool wrote between them is no step, and discounts nothing.
    """
    is_action_T = mask_T != 0
    returns_T = torch.zeros_like(mask_T)
    rewards_T = sequence_rewards(reward, kl_T, mask_T, kl_coef=kl_coef)
    returns_T[is_action_T] = discounted(rewards_T[is_action_T], gamma)
    return returns_T


def whitened(values: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """Normalize each [T] over all unmasked tokens: (x - mean) rsqrt(var + 1e-8), zero where masked.

    Advantage normalisation (Andrychowicz et al. 2020, arXiv:2006.05990), over a global batch as in REINFORCE++ (Hu et
    al. 2025, arXiv:2501.03262). The variance is Bessel-corrected. `values` must be a whole batch: whitening parts of it
    gives other results. Fewer than two tokens have no scale and give zeros, as equal values do.
    """
    masked_values = torch.cat([value_T[mask_T != 0] for value_T, mask_T in zip(values, masks, strict=True)])
    if len(masked_values) < 2 or bool((masked_values == masked_values[0]).all()):
        return [torch.zeros_like(value_T) for value_T in values]
    mean, scale = masked_values.mean(), torch.rsqrt(masked_values.var() + VARIANCE_EPSILON)
    return [(value_T - mean) * scale * (mask_T != 0) for value_T, mask_T in zip(values, masks, strict=True)]


STD_EPSILON = 1e-6


def group_normalized(rewards_G: Tensor, *, std_normalization: bool = True) -> Tensor:
    """Rewards of one group, centred on their mean and divided by their standard deviation; [G] to [G].

    Shao et al. 2024, arXiv:2402.03300, section 4.1.2: (r - mean(r)) / (std(r) + 1e-6), the unbiased std. Without
    `std_normalization` only centred (Dr. GRPO, arXiv:2503.20783). Equal rewards, one member included, give
    exact zeros: rounding in their mean would otherwise come out divided by 1e-6.
    """
    if rewards_G.numel() == 0 or bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (rewards_G.std() + STD_EPSILON) if std_normalization else centred_G


def leave_one_out(rewards_G: Tensor) -> Tensor:
    """Each reward less the mean of the others in its group; [G] to [G].

    RLOO, Ahmadian et al. 2024, arXiv:2402.14740: r_i - mean(r_j, j != i). Equal
    rewards, one member included, give exact zeros.
    """
    count = rewards_G.numel()
    if count == 0 or bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)
    return rewards_G - (rewards_G.sum() - rewards_G) / (count - 1)


def length_weighted(rewards_G: Tensor, lengths_G: Tensor) -> Tensor:
    """Each reward less sum(length reward) / sum(length) of its group; [G], [G] to [G].

    OPO, Hao et al. 2025, arXiv:2505.23585: the baseline of least variance where the squared gradient of a
    sequence grows with its length. Equal rewards give exact zeros; without any length the mean is the plain one.
    """
    if rewards_G.numel() == 0 or bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)
    weights_G = lengths_G if bool(lengths_G.any()) else torch.ones_like(rewards_G)
    return rewards_G - (weights_G * rewards_G).sum() / weights_G.sum()


def mean_normalized(rewards_G: Tensor) -> Tensor:
    """(r - mean) / mean of one group, for rewards that are not negative; [G] to [G].

    MaxRL, Tajwar et al. 2026, arXiv:2602.02710: over groups of n this is the gradient of the log-likelihood of a right
    answer, expanded to pass@n. Equal rewards, none right included, give exact zeros.
    Raises RecordError on a negative reward.
    """
    if rewards_G.numel() == 0 or bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)
    if bool((rewards_G < 0).any()):
        raise RecordError(
            f"a reward of {float(rewards_G.min()):g}: algorithm.name maxrl wants rewards from 0 on; use grpo"
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
    """Return the advantage of every sample within its group, in the order of the input; sequences of one length.

    >>> group_advantages([1.0, 7.0, 3.0], groups=[0, 9, 0], executions=[0, 1, 2], std_normalization=False)
    [-1.0, 0.0, 1.0]

    A group is all samples of one id, in any order and number. Samples of one execution (fan-out) are one attempt: it
    counts once, with the mean of their rewards and the sum of their lengths, and they share its advantage.
    `std_normalization` applies to group_mean; only length_weighted reads `lengths`, in trained tokens.

    Raises ValueError on unequal lengths and on a reward that is not finite.
    """
    if not len(rewards) == len(groups) == len(executions):
        raise ValueError(f"{len(rewards)} rewards, {len(groups)} groups, {len(executions)} executions: not one of each")
    if baseline == "length_weighted" and len(lengths) != len(rewards):
        raise ValueError(f"{len(lengths)} lengths for {len(rewards)} rewards")
    attempts: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for position, (reward, group, execution) in enumerate(zip(rewards, groups, executions, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(f"rewards[{position}] is {reward}, which no advantage can be made of")
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


def _per_attempt(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
