"""Rewards in, advantages out: how much better an attempt was than its siblings.

G group
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

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


def group_advantages(
    rewards: Sequence[float], groups: Sequence[int], executions: Sequence[int], *, std_normalization: bool = True
) -> list[float]:
    """The group-normalised reward of every sample, in the order given; three sequences of one length.

    >>> group_advantages([1.0, 7.0, 3.0], groups=[0, 9, 0], executions=[0, 1, 2], std_normalization=False)
    [-1.0, 0.0, 1.0]

    A group is all samples of one id, wherever they stand and however many they are. Samples of one execution (fan-out)
    are one attempt: it counts once, with the mean of their rewards, and they share its advantage.

    Raises ValueError on unequal lengths and on a reward that is not finite.
    """
    if not len(rewards) == len(groups) == len(executions):
        raise ValueError(f"{len(rewards)} rewards, {len(groups)} groups, {len(executions)} executions: not one of each")
    attempts: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for position, (reward, group, execution) in enumerate(zip(rewards, groups, executions, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(f"rewards[{position}] is {reward}, which no advantage can be made of")
        attempts[group][execution].append(float(reward))
    advantages: dict[tuple[int, int], float] = {}
    for group, by_execution in attempts.items():
        rewards_G = torch.tensor([fmean(shared) for shared in by_execution.values()], dtype=torch.float64)
        normalized_G = group_normalized(rewards_G, std_normalization=std_normalization)
        for execution, advantage in zip(by_execution, normalized_G.tolist(), strict=True):
            advantages[group, execution] = advantage
    return [advantages[key] for key in zip(groups, executions, strict=True)]
