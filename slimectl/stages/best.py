"""Finds the best evaluation of a run, and collapses of its accuracy or reward."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from slimectl.types import Metrics

Points = Sequence[tuple[int, float]]
"""(round, value), oldest first."""
LOWER_IS_BETTER = ("loss", "truncated_ratio", "error", "no_reward")
WINDOW = 3
"""Number of rounds over which rewards are averaged for a comparison."""


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run by one metric of [eval], named as in run.save_best.

    >>> evaluations = [(0, {"eval/words": 0.5}), (4, {"eval/words": 0.9}), (8, {"eval/words": 0.7})]
    >>> Evaluations("words", evaluations).best, Evaluations("words", evaluations).since_best
    ((4, 0.9), 1)
    """

    name: str
    evaluations: Sequence[tuple[int, Metrics]]

    @property
    def metric(self) -> str:
        return "eval/" + self.name.removeprefix("eval/")

    @property
    def points(self) -> list[tuple[int, float]]:
        values = [(number, metrics.get(self.metric, math.nan)) for number, metrics in self.evaluations]
        return [(number, value) for number, value in values if not math.isnan(value)]

    @property
    def best(self) -> tuple[int, float] | None:
        """Round and value of the best evaluation (the first of equal ones), or None if there is none."""
        sign = -1 if self.metric.endswith(LOWER_IS_BETTER) else 1
        return max(self.points, key=lambda point: sign * point[1], default=None)

    @property
    def since_best(self) -> int:
        """Number of evaluations after the best one."""
        best = self.best
        return 0 if best is None else sum(number > best[0] for number, _ in self.points)


@dataclass(frozen=True)
class Collapse:
    """A value that was high at `round` and has lost more than half of its height by `last_round`."""

    name: str
    round: int
    value: float
    last_round: int
    last: float

    def __str__(self) -> str:
        was, now = (f"{value:.3g}" for value in (self.value, self.last))
        return f"{self.name} collapsed: it was {was} at round {self.round} and is {now} at round {self.last_round}"


def find_collapse(rewards: Points, evaluations: Sequence[tuple[int, Metrics]]) -> Collapse | None:
    """Return the collapse of an accuracy, else of the reward, or None if neither has collapsed.

    An accuracy has collapsed if the last is less than half of the best one, by more than two standard errors of both.
    The reward has collapsed if each of the last WINDOW rounds is below each of the best WINDOW, and the mean has lost
    more than half of its height. Heights are measured from 0, or from the lowest reward if it is negative.
    """
    names = dict.fromkeys(name for _, metrics in evaluations for name in metrics if name.endswith("_accuracy"))
    for name in names:
        history = Evaluations(name, evaluations)
        if (best := history.best) is None:
            continue
        last_round, last = history.points[-1]
        errors = {number: metrics.get(f"{name}_stderr", 0.0) for number, metrics in evaluations}
        if last < best[1] / 2 and best[1] - last > 2 * (errors[best[0]] + errors[last_round]):
            return Collapse(name, *best, last_round, last)
    return _reward_collapse(rewards)


def _reward_collapse(rewards: Points) -> Collapse | None:
    if len(rewards) < 2 * WINDOW:
        return None
    values = [value for _, value in rewards]
    starts = range(len(values) - 2 * WINDOW + 1)
    start = max(starts, key=lambda i: statistics.fmean(values[i : i + WINDOW]))
    top, end, low = values[start : start + WINDOW], values[-WINDOW:], min(0.0, *values)
    peak, now = statistics.fmean(top), statistics.fmean(end)
    if min(top) <= max(end) or now - low >= (peak - low) / 2:
        return None
    middle = rewards[start + WINDOW // 2][0]
    return Collapse("the mean reward", middle, peak, rewards[-1][0], now)
