"""Is this reward fit to train on? Answered on a few samples, before a run depends on it."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from slimectl.errors import HookError
from slimectl.ports import Executor
from slimectl.rewards import Verdict
from slimectl.settings.score import ScoreSettings
from slimectl.stages.grader import Calls, as_calls
from slimectl.stages.score import reward_number
from slimectl.types import Sample

Bounds = Callable[[Sample], "tuple[float, float] | None"]
"""Between which numbers the reward of a sample should lie; None where nobody says."""


@dataclass(frozen=True)
class Finding:
    """One line of the report; a training run should not start with one that is not `fine`."""

    fine: bool
    check: str
    text: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.fine else 'FAIL'}  {self.check:<12} {self.text}"


@dataclass(frozen=True)
class Tried:
    """What two calls of the reward gave for one sample; the second is on the clock, without imports."""

    sample: Sample
    results: tuple[Any, Any] = (None, None)
    seconds: float = 0.0
    error: str = ""
    number: float | None = None
    fault: str = ""
    """Why there is no number to train on; "" if there is."""


@dataclass(frozen=True)
class Twice:
    """Calls a reward twice; travels to worker processes."""

    reward: Calls

    def __call__(self, samples: list[Sample]) -> list[tuple[Any, Any, float]]:
        """Both rewards of every sample of one call, and its share of the seconds."""
        first = self.reward.many(samples)
        started = time.perf_counter()
        second = self.reward.many(samples)
        seconds = (time.perf_counter() - started) / len(samples)
        return [(_bare(one), _bare(other), seconds) for one, other in zip(first, second, strict=True)]


def check_reward(
    samples: list[Sample],
    reward: Callable[[Sample], Any],
    settings: ScoreSettings,
    *,
    executor: Executor,
    bounds: Bounds = lambda sample: None,
) -> Iterator[Finding]:
    """One finding a check: errors, type, range, determinism, time, variance.

    Graded in worker processes, at least one, so that the time limit holds for functions that hang, too.
    """
    workers, limit = max(1, settings.processes), settings.timeout_s
    grader = as_calls(reward)
    calls = list(grader.calls(samples))
    results = executor.map(Twice(grader), calls, workers=workers, timeout_s=2 * (limit + grader.patience_s))
    pairs = [pair for call, result in zip(calls, results, strict=True) for pair in _paired(call, result)]
    late = [sample for sample, result in pairs if isinstance(result, TimeoutError)]
    tried = [_tried(*pair, settings) for pair in pairs if not isinstance(pair[1], TimeoutError)]
    ran = [one for one in tried if not one.error]
    numbers = [one for one in ran if one.number is not None]
    yield _counted("errors", [(one.sample, one.error) for one in tried if one.error], f"{len(ran)} samples graded")
    faults = [(one.sample, one.fault) for one in ran if one.fault]
    yield _counted("type", faults, f"{len(numbers)} finite numbers")
    yield _range(numbers, bounds)
    changed = [
        (one.sample, f"{one.results[0]!r}, then {one.results[1]!r}")
        for one in ran
        if repr(one.results[0]) != repr(one.results[1])
    ]
    yield _counted("determinism", changed, "the same reward twice")
    yield _time(ran, late, limit, workers)
    yield _variance(numbers)


def _paired(call: list[Sample], result: Any) -> list[tuple[Sample, Any]]:
    """Each sample with what came of it; what went wrong with a call went wrong with all of its samples."""
    return [
        (sample, result) if isinstance(result, BaseException) else (sample, result[i]) for i, sample in enumerate(call)
    ]


def _tried(sample: Sample, result: Any, settings: ScoreSettings) -> Tried:
    if isinstance(result, BaseException):
        return Tried(sample, error=f"{type(result).__name__}: {result}")
    first, second, seconds = result
    try:
        number = reward_number(replace(sample, reward=first), settings.reward_key)
    except HookError as error:
        return Tried(sample, (first, second), seconds, fault=str(error))
    return Tried(sample, (first, second), seconds, number=number)


def _bare(result: Any) -> Any:
    return result.reward if isinstance(result, Verdict) else result


def _counted(check: str, faults: list[tuple[Sample, str]], fine: str) -> Finding:
    if not faults:
        return Finding(True, check, fine)
    sample, text = faults[0]
    return Finding(False, check, f"{len(faults)} samples, the first is sample {sample.index}: {text}")


def _range(tried: list[Tried], bounds: Bounds) -> Finding:
    numbers = [one.number for one in tried if one.number is not None]
    if not numbers:
        return Finding(False, "range", "there is no number")
    for one in tried:
        allowed = bounds(one.sample)
        if allowed and one.number is not None and not allowed[0] - 1e-9 <= one.number <= allowed[1] + 1e-9:
            told = f"sample {one.sample.index}: {one.number:g} is not from {allowed[0]:g} to {allowed[1]:g}"
            return Finding(False, "range", told)
    return Finding(True, "range", f"{min(numbers):g} to {max(numbers):g}, mean {statistics.fmean(numbers):.4g}")


def _time(tried: list[Tried], late: list[Sample], limit: float, workers: int) -> Finding:
    if late:
        told = f"{len(late)} samples took longer than {limit:g} s, the first is sample {late[0].index}"
        return Finding(False, "time", told)
    if not tried:
        return Finding(False, "time", "nothing ran to its end")
    seconds = [one.seconds for one in tried]
    slowest = max(tried, key=lambda one: one.seconds)
    told = (
        f"{statistics.fmean(seconds) * 1e3:.3g} ms a sample, at most {slowest.seconds * 1e3:.3g} ms "
        f"(sample {slowest.sample.index}; limit {limit:g} s), {workers} worker{'s' if workers > 1 else ''}"
    )
    return Finding(True, "time", told)


def _variance(tried: list[Tried]) -> Finding:
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for one in tried:
        if one.number is not None:
            groups[one.sample.group_index].append(one.number)
    several = [numbers for numbers in groups.values() if len(numbers) > 1]
    if not several:
        return Finding(True, "variance", "no group has two samples; nothing to compare")
    uneven = [numbers for numbers in several if max(numbers) > min(numbers)]
    spread = statistics.fmean(statistics.pstdev(numbers) for numbers in several)
    told = f"{len(uneven)} of {len(several)} groups have different rewards (mean deviation {spread:.3g})"
    return Finding(bool(uneven), "variance", told if uneven else f"{told}; group-relative advantages are all 0")
