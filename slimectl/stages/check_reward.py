"""Checks a reward function on a few samples before training: errors, type, range, determinism, time, variance."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from slimectl.errors import HookError
from slimectl.protocols import Executor
from slimectl.rewards import Grade
from slimectl.settings.score import ScoreSettings
from slimectl.stages.grader import BatchedReward, as_batched, worker_count
from slimectl.stages.score import reward_number
from slimectl.system.stdio import quantity
from slimectl.types import Sample

Bounds = Callable[[Sample], "tuple[float, float] | None"]
"""Returns the (lowest, highest) reward expected for a sample, or None if unknown."""


@dataclass(frozen=True)
class RewardCheck:
    """One line of the report. Do not start a training run if one of them is not `fine`."""

    fine: bool
    check: str
    text: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.fine else 'FAIL'}  {self.check:<12} {self.text}"


@dataclass(frozen=True)
class Trial:
    """Results of calling the reward twice on one sample. Only the second call is timed, so imports do not count."""

    sample: Sample
    results: tuple[Any, Any] = (None, None)
    seconds: float = 0.0
    error: str = ""
    number: float | None = None
    fault: str = ""
    """Reason why the result has no number to train on, or "" if it has one."""


@dataclass(frozen=True)
class RunTwice:
    """Calls a reward twice. It is pickled to worker processes."""

    reward: BatchedReward

    def __call__(self, samples: list[Sample]) -> list[tuple[Any, Any, float]]:
        """Return (first reward, second reward, seconds per sample) for every sample of one call."""
        first = self.reward.grade(samples)
        started = time.perf_counter()
        second = self.reward.grade(samples)
        seconds = (time.perf_counter() - started) / len(samples)
        return [
            (_reward_of(first_result), _reward_of(second_result), seconds)
            for first_result, second_result in zip(first, second, strict=True)
        ]


def check_reward(
    samples: list[Sample],
    reward: Callable[[Sample], Any],
    settings: ScoreSettings,
    *,
    executor: Executor,
    bounds: Bounds = lambda sample: None,
) -> Iterator[RewardCheck]:
    """Yield one finding per check: errors, type, range, determinism, time, variance.

    Samples are graded in at least one worker process, so that the time limit also stops functions that hang.
    """
    grader = as_batched(reward)
    workers = max(1, worker_count(settings, grader))
    calls = list(grader.calls(samples))
    results = executor.map(
        RunTwice(grader), calls, workers=workers, timeout_s=2 * settings.timeout_s,
        wall_timeout_s=2 * (settings.wall_limit_s + grader.patience_s), prepare=grader.prepare,
    )  # fmt: skip
    pairs = [pair for call, result in zip(calls, results, strict=True) for pair in _pair_results(call, result)]
    late = [sample for sample, result in pairs if isinstance(result, TimeoutError)]
    trials = [_make_trial(*pair, settings) for pair in pairs if not isinstance(pair[1], TimeoutError)]
    completed = [trial for trial in trials if not trial.error]
    numeric = [trial for trial in completed if trial.number is not None]
    yield _check_faults(
        "errors",
        [(trial.sample, trial.error) for trial in trials if trial.error],
        f"{quantity(len(completed), 'sample')} graded",
    )
    faults = [(trial.sample, trial.fault) for trial in completed if trial.fault]
    silent = len(completed) - len(numeric) - len(faults)
    types = f"{len(numeric)} finite numbers" + (f", {silent} without a reward" if silent else "")
    yield _check_faults("type", faults, types) if completed else _nothing_ran("type")
    yield _check_range(numeric, bounds)
    changed = [
        (trial.sample, f"{trial.results[0]!r}, then {trial.results[1]!r}")
        for trial in completed
        if repr(trial.results[0]) != repr(trial.results[1])
    ]
    yield _check_faults("determinism", changed, "the same reward twice") if completed else _nothing_ran("determinism")
    yield _check_time(completed, late, settings, workers)
    yield _check_variance(numeric)


def _pair_results(call: list[Sample], result: Any) -> list[tuple[Sample, Any]]:
    """Pair each sample with its result. The error of a call is the result of all its samples."""
    return [
        (sample, result) if isinstance(result, BaseException) else (sample, result[i]) for i, sample in enumerate(call)
    ]


def _make_trial(sample: Sample, result: Any, settings: ScoreSettings) -> Trial:
    if isinstance(result, BaseException):
        return Trial(sample, error=f"{type(result).__name__}: {result}")
    first, second, seconds = result
    if first is None and settings.none_reward == "skip":
        return Trial(sample, (first, second), seconds)
    try:
        number = reward_number(replace(sample, reward=first), settings.reward_key)
    except HookError as error:
        return Trial(sample, (first, second), seconds, fault=str(error))
    return Trial(sample, (first, second), seconds, number=number)


def _reward_of(result: Any) -> Any:
    return result.reward if isinstance(result, Grade) else result


def _check_faults(check: str, faults: list[tuple[Sample, str]], success_text: str) -> RewardCheck:
    if not faults:
        return RewardCheck(True, check, success_text)
    sample, text = faults[0]
    return RewardCheck(False, check, f"{quantity(len(faults), 'sample')}, the first is sample {sample.index}: {text}")


def _nothing_ran(check: str) -> RewardCheck:
    return RewardCheck(False, check, "no call completed")


def _check_range(trials: list[Trial], bounds: Bounds) -> RewardCheck:
    numbers = [trial.number for trial in trials if trial.number is not None]
    if not numbers:
        return RewardCheck(False, "range", "no numbers to compare")
    for trial in trials:
        allowed = bounds(trial.sample)
        if allowed and trial.number is not None and not allowed[0] - 1e-9 <= trial.number <= allowed[1] + 1e-9:
            message = f"sample {trial.sample.index}: {trial.number:g} is not between {allowed[0]:g} and {allowed[1]:g}"
            return RewardCheck(False, "range", message)
    return RewardCheck(True, "range", f"{min(numbers):g} to {max(numbers):g}, mean {statistics.fmean(numbers):.4g}")


def _check_time(trials: list[Trial], late: list[Sample], limits: ScoreSettings, workers: int) -> RewardCheck:
    if late:
        message = (
            f"{quantity(len(late), 'sample')} took more than {limits.timeout_s:g} s of CPU time or "
            f"{limits.wall_limit_s:g} s of wall time, the first is sample {late[0].index}"
        )
        return RewardCheck(False, "time", message)
    if not trials:
        return _nothing_ran("time")
    seconds = [trial.seconds for trial in trials]
    slowest = max(trials, key=lambda trial: trial.seconds)
    message = (
        f"{statistics.fmean(seconds) * 1e3:.3g} ms per sample, at most {slowest.seconds * 1e3:.3g} ms "
        f"(sample {slowest.sample.index}, limit {limits.timeout_s:g} s), {workers} worker{'s' if workers > 1 else ''}"
    )
    return RewardCheck(True, "time", message)


def _check_variance(trials: list[Trial]) -> RewardCheck:
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for trial in trials:
        if trial.number is not None:
            groups[trial.sample.group_index].append(trial.number)
    several = [numbers for numbers in groups.values() if len(numbers) > 1]
    if not several:
        return RewardCheck(True, "variance", "no group has two samples to compare")
    uneven = [numbers for numbers in several if max(numbers) > min(numbers)]
    spread = statistics.fmean(statistics.pstdev(numbers) for numbers in several)
    message = f"{len(uneven)} of {len(several)} groups have different rewards (mean deviation {spread:.3g})"
    return RewardCheck(
        bool(uneven), "variance", message if uneven else f"{message}, so group-relative advantages are all 0"
    )
