"""The history of a run that detectors look at: one value per round and metric, and the run's settings."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from slimectl.diagnosis.finding import Evidence
from slimectl.diagnosis.limits import BASELINE, SHOWN

LARGEST = ("train/grad_norm", "train/pg_clipfrac", "train/ratio_high_clipfrac", "train/ratio_low_clipfrac",
           "train/approxkl", "train/ppo_kl", "train/lr")  # fmt: skip
"""Metrics of which a round keeps the largest step, because the first step of a round is often 0."""
FIRST = ("train/train_rollout_logprob_abs_diff",)
"""Metrics of which a round keeps the first step. With algorithm.use_rollout_logprobs later steps include training."""
KEPT = ("train/", "rollout/", "perf/")
"""Prefixes of the metrics of rounds."""
TOTAL = "perf/total_time"
"""Metric of perf.jsonl that ends a round."""


@dataclass
class Series:
    """The values of a metric and their rounds, oldest first. Rounds without a value are absent."""

    rounds: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, number: int, value: float) -> None:
        self.rounds.append(number)
        self.values.append(value)

    def __len__(self) -> int:
        return len(self.values)

    def tail(self, count: int) -> list[float]:
        return list(self.values[-count:])

    @cached_property
    def _first(self) -> float:
        return statistics.median(self.values[:BASELINE])

    @property
    def baseline(self) -> float:
        """Median of the first rounds, which are part of every later comparison."""
        return self._first if len(self) >= BASELINE else statistics.median(self.values)

    @property
    def noise(self) -> float:
        """Deviation of a round from its neighbours, by the median of the last differences, so that a trend adds little.

        A normal distribution has a deviation of 1.4826 medians of absolute values, and differences add two of them.
        """
        recent = self.values[-101:]
        steps = [abs(after - before) for before, after in pairwise(recent)]
        return 1.4826 / math.sqrt(2) * statistics.median(steps) if steps else 0.0


NOTHING = Series()


class History:
    """What a run has recorded so far, and its settings by dotted key.

    A round's value of a metric is the mean over its steps, or the extreme for metrics that are extremes.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.round = 0
        """The last complete round."""
        self.evaluated = 0
        """The round of the last evaluation."""
        self.steps = 0
        """Optimizer steps of the last complete round."""
        self.is_recorded = False
        """Whether rounds come from files instead of an engine."""
        self.series: dict[str, Series] = {}
        self.evaluations: dict[str, Series] = {}
        self._open: dict[str, list[float]] = {}

    # --- feeding -----------------------------------------------------------------------------------------------------

    def add_step(self, metrics: Iterable[tuple[str, float]]) -> None:
        """Add the metrics of a step to the open round."""
        for name, value in metrics:
            if name.startswith(KEPT):
                self._open.setdefault(name, []).append(value)

    def close(self, number: int) -> None:
        """Complete the open round under its number."""
        self.round, self.steps = number, len(self._open.get("train/step", ()))
        for name, values in self._open.items():
            self.series.setdefault(name, Series()).add(number, _of_round(name, values))
        self._open = {}

    def add_evaluation(self, number: int, metrics: Iterable[tuple[str, float]]) -> None:
        self.evaluated = number
        for name, value in metrics:
            self.evaluations.setdefault(name, Series()).add(number, value)

    # --- asking ------------------------------------------------------------------------------------------------------

    def setting(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting, or `default` if the run's version did not have it or it is not set."""
        value = self.settings.get(name)
        return default if value is None else value

    def of(self, name: str) -> Series:
        """Return the series of a metric, which is empty if the last round does not have it."""
        series = self.series.get(name, NOTHING)
        return series if len(series) and series.rounds[-1] == self.round else NOTHING

    def last(self, name: str, default: float = 0.0) -> float:
        """Return the value of the last round."""
        series = self.of(name)
        return series.values[-1] if len(series) else default

    def under(self, prefix: str) -> Iterator[tuple[str, Series]]:
        """Yield the rest of the name and the series of each metric of the last round below a prefix."""
        for name, series in self.series.items():
            if name.startswith(prefix) and series.rounds[-1] == self.round:
                yield name.removeprefix(prefix), series

    def evidence(self, *names: str, count: int = SHOWN) -> tuple[Evidence, ...]:
        """Return the last values of metrics, without metrics that were 0 except the first."""
        present = [(name, self.series.get(name) or self.evaluations.get(name) or NOTHING) for name in names]
        return tuple(
            Evidence(name, tuple(series.rounds[-count:]), tuple(series.values[-count:]))
            for number, (name, series) in enumerate(present)
            if len(series) and (not number or any(series.values[-count:]))
        )

    def has_learned(self) -> bool:
        """Return whether the reward has risen since the first rounds by more than noise."""
        reward = self.of("rollout/raw_reward")
        return gain(reward) > significant(reward)

    @property
    def planned(self) -> int | None:
        return self.settings.get("run.num_rollout")


def gain(series: Series, window: int = BASELINE) -> float:
    """Return the mean of the last rounds minus the mean of the first ones. They do not overlap."""
    if len(series) < 2 * window:
        return 0.0
    return statistics.fmean(series.values[-window:]) - statistics.fmean(series.values[:window])


def significant(series: Series, window: int = BASELINE) -> float:
    """Return the difference of two means of `window` rounds that noise alone hardly ever reaches."""
    return 4 * series.noise * math.sqrt(2 / window)


def _of_round(name: str, values: list[float]) -> float:
    if len(values) == 1 or name in FIRST:
        return values[0]
    if name.endswith("_max") or name in LARGEST:
        return max(values)
    return min(values) if name.endswith("_min") else statistics.fmean(values)
