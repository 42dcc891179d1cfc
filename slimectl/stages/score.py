"""Samples in, rewarded samples out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from slimectl.data.plain import kind_of
from slimectl.errors import HookError, RecordError, SlimectlError
from slimectl.hooks import in_one_line
from slimectl.ports import Executor, Policy
from slimectl.rewards import Verdict
from slimectl.rewards.asking import Asker
from slimectl.rewards.verdict import is_number
from slimectl.settings.score import ScoreSettings
from slimectl.stages.grader import Calls, Grader, as_calls
from slimectl.stages.teaching import with_log_probs
from slimectl.types import Sample, Status

__all__ = ["Grader", "reward_number", "score"]


Skip = Callable[[Sample, RecordError], None]
"""Takes a sample that cannot be graded, and why."""


def score(
    samples: Iterable[Sample],
    reward: Callable[[Sample], Any],
    settings: ScoreSettings,
    *,
    executor: Executor,
    reference: Policy | None = None,
    skip: Skip | None = None,
) -> Iterator[Sample]:
    """Grade every sample, in order; with a `reference` its log-probabilities are attached too.

    `reward` returns a number, a dict of which settings.reward_key picks one, or a Verdict: that is a reward which also
    goes into metadata.explanation. A Grader also takes many samples in one call, and waits for many servers at once:
    then up to settings.concurrency calls are drawn from `samples` beyond what has been asked for.

    A sample that overran the time limit gets reward 0 and the reason in metadata.reward_error; so does one whose
    attempt failed. What cannot be graded for what its record says (no label, an unknown verifier) is handed to `skip`
    with the error and left out; without it that RecordError is raised. Raises HookError if the reward is no finite
    number, or no dict that has one under `settings.reward_key`.
    """
    graded = _graded(samples, reward, settings, executor, skip)
    yield from graded if reference is None else with_log_probs(graded, reference, "ref_log_probs", again=True)


def _graded(
    samples: Iterable[Sample],
    reward: Callable[[Sample], Any],
    settings: ScoreSettings,
    executor: Executor,
    skip: Skip | None,
) -> Iterator[Sample]:
    grader = as_calls(reward)
    waiting: deque[list[Sample]] = deque()

    def handed_out() -> Iterator[list[Sample]]:
        for call in grader.calls(samples):
            waiting.append(call)
            yield call

    if workers := settings.processes:
        limit = settings.timeout_s + grader.patience_s
        results = executor.map(grader.many, handed_out(), workers=workers, timeout_s=limit)
    else:
        results = _here(grader, handed_out(), settings.concurrency)
    with ExitStack() as ending:
        if isinstance(results, Generator):  # not left to the garbage collector when a result is an error
            ending.callback(results.close)
        for result in results:
            call = waiting.popleft()
            if skip is not None and isinstance(result, RecordError):
                for sample in call:
                    skip(sample, result)
                continue
            if isinstance(result, ChildProcessError):
                raise HookError(f"{_which(call)}: {_grader_name(settings)}: {result}; mend it, or give it more memory")
            yield from _rewarded(call, result, settings)


def _here(grader: Calls, calls: Iterable[list[Sample]], concurrency: int) -> Iterator[list[Any] | BaseException]:
    """What each call gives, in order: graded in this thread when it is asked for, or, where grading is waiting, many
    at once meanwhile."""
    window: deque[list[Sample] | Future[list[Any]]] = deque()
    with ExitStack() as closing:
        asker: Asker | None = None
        for call in calls:
            if grader.waits(call):
                asker = asker or closing.enter_context(Asker())
                window.append(asker.submit(grader.asked(call, asker)))
            else:
                window.append(call)
            while window and (len(window) >= concurrency or isinstance(window[0], list) or window[0].done()):
                yield _outcome(grader, window.popleft())
        while window:
            yield _outcome(grader, window.popleft())


def _outcome(grader: Calls, call: list[Sample] | Future[list[Any]]) -> list[Any] | BaseException:
    try:
        return grader.many(call) if isinstance(call, list) else call.result()
    except Exception as error:
        return error


def _rewarded(samples: list[Sample], result: list[Any] | BaseException, settings: ScoreSettings) -> Iterator[Sample]:
    """The samples of one call with what came of it. Raises what is not to be mended by going on."""
    late = isinstance(result, TimeoutError)
    if isinstance(result, HookError) and " of sample " not in str(result):  # of a function that knows no numbers
        raise HookError(f"{_which(samples)}: {result}") from result
    if isinstance(result, SlimectlError):
        raise result
    rewards = [0.0] * len(samples) if isinstance(result, BaseException) else result
    for sample, reward in zip(samples, rewards, strict=True):
        if sample.status is Status.FAILED:
            sample.reward = 0.0
        elif late:
            sample.reward = 0.0
            sample.metadata["reward_error"] = str(result)
        elif isinstance(result, BaseException):
            raise HookError(f"reward of sample {sample.index}: {in_one_line(result)}") from result
        else:
            if isinstance(reward, Verdict):
                sample.metadata["explanation"] = reward.to_json()
                reward = reward.reward
            sample.reward = reward
            try:
                reward_number(sample, settings.reward_key)
            except HookError as error:
                raise HookError(f"{_grader_name(settings)}: {error}") from None
        yield sample


def _grader_name(settings: ScoreSettings) -> str:
    path, rm_type = settings.custom_rm_path, settings.rm_type
    return f"score.custom_rm_path: {path}" if path else f"score.rm_type: {rm_type}" if rm_type else "score.rm"


def _which(samples: list[Sample]) -> str:
    first, last = samples[0].index, samples[-1].index
    return f"sample {first}" if len(samples) == 1 else f"samples {first} to {last}"


def reward_number(sample: Sample, reward_key: str | None) -> float:
    """The number that is trained on. Raises HookError, naming the sample and what came instead."""
    value: Any = sample.reward
    if isinstance(value, dict):
        if reward_key is None:
            reward_key = "score" if "score" in value else None
        if reward_key not in value:
            known = ", ".join(map(str, value)) or "nothing"
            what = "not set, and no 'score' is" if reward_key is None else f"{reward_key!r} is not"
            raise HookError(f"score.reward_key: {what} in the reward of sample {sample.index} ({known}); name one")
        value = value[reward_key]
    if isinstance(value, bool):
        value = float(value)
    if not is_number(value):
        raise HookError(
            f"reward of sample {sample.index} is {kind_of(value)}, not a finite number; mend the reward function"
            + ("" if not isinstance(sample.reward, dict) else f" (key {reward_key!r})")
        )
    return float(value)
