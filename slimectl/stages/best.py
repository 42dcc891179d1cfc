"""Finds the best evaluation of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slimectl.types import Metrics

LOWER_IS_BETTER = ("loss", "truncated_ratio", "error", "no_reward")


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
