"""Normalization of rewards by the mean and the standard deviation of a group, a batch or a whole run, and bounds.

G rewards of one population: a group, a round, or all rounds so far
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slimectl.settings.needs import NormKind

STD_EPSILON = 1e-6


@dataclass
class RewardMoments:
    """Count, mean and spread of the rewards of all rounds so far. It is part of every checkpoint.

    Parallel updates of Chan, Golub and LeVeque 1979 (Stanford CS-79-773), so that the numbers stay exact over long
    runs.

    >>> moments = RewardMoments()
    >>> moments.add([1.0, 3.0])
    >>> moments.add([5.0])
    >>> moments.mean, moments.std
    (3.0, 2.0)
    """

    count: int = 0
    mean: float = 0.0

    squares: float = 0.0
    """Sum of squared deviations from the mean."""

    def add(self, rewards_G: Sequence[float]) -> None:
        """Add the rewards of a round."""
        if not rewards_G:
            return
        mean = _mean(rewards_G)
        squares = math.fsum((reward - mean) ** 2 for reward in rewards_G)
        total, shift = self.count + len(rewards_G), mean - self.mean
        self.squares += squares + shift**2 * self.count * len(rewards_G) / total
        self.mean = self.mean + shift * len(rewards_G) / total if self.count else mean
        self.count = total

    @property
    def std(self) -> float:
        """The unbiased standard deviation, or 0 for fewer than two rewards."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


def moments_of(rewards_G: Sequence[float]) -> RewardMoments:
    """Return the moments of one population."""
    moments = RewardMoments()
    moments.add(rewards_G)
    return moments


def normalized(
    rewards: Sequence[float], groups: Sequence[int], kinds: tuple[NormKind, NormKind], running: RewardMoments
) -> list[float]:
    """Return (r - mean) / (std + 1e-6) of every attempt's reward. `kinds` selects where mean and std come from.

    >>> normalized([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], ("batch", "off"), RewardMoments())
    [0.25, -0.75, 0.25, 0.25]

    "group" is the attempt's group, "batch" all attempts, "running" the moments of all rounds, "off" subtracts 0 or
    divides by nothing. Group statistics: Shao et al. 2024, arXiv:2402.03300, section 4.1.2. A mean by group with a std
    by batch: Hu et al. 2025, arXiv:2501.03262. Stds are unbiased. A std of 0 has no scale, so those rewards are not
    divided.
    """
    by_group: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        by_group.setdefault(group, []).append(reward)
    of_group = {group: moments_of(rewards_G) for group, rewards_G in by_group.items()}
    nothing, batch = RewardMoments(), moments_of(rewards)
    shared = {"batch": batch, "running": running, "off": nothing}
    values = []
    for reward, group in zip(rewards, groups, strict=True):
        mean, std = (shared.get(kind, of_group[group]) for kind in kinds)
        values.append((reward - mean.mean) / (std.std + STD_EPSILON if std.std else 1.0))
    return values


def clamped(values: Iterable[float], bound: float | None) -> list[float]:
    """Return the values bounded to [-bound, bound], or unchanged without a bound. Mnih et al. 2015 clip rewards so.

    >>> clamped([-3.0, 0.5, 2.5], 2.0)
    [-2.0, 0.5, 2.0]
    """
    return list(values) if bound is None else [min(bound, max(-bound, value)) for value in values]


def share_beyond(values: Sequence[float], bound: float) -> float:
    """Return the share of values that `clamped` changes, or 0 without values."""
    return sum(abs(value) > bound for value in values) / len(values) if values else 0.0


def _mean(values_G: Sequence[float]) -> float:
    """Return the mean. Equal values have exactly themselves as their mean, so that their deviations are exact zeros."""
    first = values_G[0]
    return first if all(value == first for value in values_G) else math.fsum(values_G) / len(values_G)
