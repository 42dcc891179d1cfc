"""Attaches log-probabilities of another model (reference, teacher) to samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Literal

from slimectl.data.json_values import kind_of
from slimectl.data.streams import batched
from slimectl.errors import HookError, RecordError, SlimectlError
from slimectl.protocols import Executor, LogProbModel
from slimectl.rewards import Grade
from slimectl.rewards.base import is_number
from slimectl.settings.score import ScoreSettings
from slimectl.stages.grader import BatchedReward, Grader, as_batched, worker_count
from slimectl.transport.client import HttpClient
from slimectl.types import Sample, Status, TrainingSample
from slimectl.user_code import in_one_line

BATCH = 64
"""Samples per forward pass of the model."""


def attach_log_probs(
    samples: Iterable[Sample],
    model: LogProbModel,
    field: Literal["ref_log_probs", "teacher_log_probs"],
    *,
    again: bool = False,
) -> Iterator[Sample]:
    """Yield every sample with the log-probabilities of its response under `model`, stored in `field`.

    Existing values are kept, unless `again` recomputes them.
    """
    for batch in batched(samples, BATCH):
        lacking = [sample for sample in batch if again or getattr(sample, field) is None]
        rows = [
            TrainingSample(s.tokens, s.response_length, [0.0] * s.response_length, group=s.group_index) for s in lacking
        ]
        for sample, log_probs in zip(lacking, model.log_probs(rows) if rows else [], strict=True):
            setattr(sample, field, log_probs)
        yield from batch


__all__ = ["Grader", "reward_number", "score"]


Skip = Callable[[Sample, RecordError], None]
"""Called with a sample that cannot be graded, and the error."""


def score(
    samples: Iterable[Sample],
    reward: Callable[[Sample], Any],
    settings: ScoreSettings,
    *,
    executor: Executor,
    reference: LogProbModel | None = None,
    skip: Skip | None = None,
) -> Iterator[Sample]:
    """Grade every sample, in order; a `reference` also attaches its log-probabilities.

    `reward` returns a number, a dict from which settings.reward_key picks one, or a Verdict, whose explanation is
    stored in metadata.explanation. A Grader also grades many samples in one call and waits for many servers
    concurrently: then up to settings.concurrency calls are read ahead from `samples`.

    A sample that exceeded the time limit gets reward 0 and the reason in metadata.reward_error; a sample whose attempt
    failed gets reward 0 too. A sample whose record prevents grading (no label, an unknown verifier) is passed to
    `skip` with the error and left out; without `skip` that RecordError is raised. Raises HookError if the reward is
    not a finite number, or not a dict with one under `settings.reward_key`.
    """
    graded = _grade_samples(samples, reward, settings, executor, skip)
    yield from graded if reference is None else attach_log_probs(graded, reference, "ref_log_probs", again=True)


def _grade_samples(
    samples: Iterable[Sample],
    reward: Callable[[Sample], Any],
    settings: ScoreSettings,
    executor: Executor,
    skip: Skip | None,
) -> Iterator[Sample]:
    grader = as_batched(reward)
    waiting: deque[list[Sample]] = deque()

    def submitted_calls() -> Iterator[list[Sample]]:
        for call in grader.calls(samples):
            waiting.append(call)
            yield call

    if workers := worker_count(settings, grader):
        limit = settings.timeout_s + grader.patience_s
        results = executor.map(grader.many, submitted_calls(), workers=workers, timeout_s=limit)
    else:
        results = _grade_in_thread(grader, submitted_calls(), settings.concurrency)
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
                raise HookError(
                    f"{_sample_range(call)}: {_grader_name(settings)}: {result}; mend it, or give it more memory"
                )
            yield from _attach_rewards(call, result, settings)


def _grade_in_thread(
    grader: BatchedReward, calls: Iterable[list[Sample]], concurrency: int
) -> Iterator[list[Any] | BaseException]:
    """Yield the result of each call, in order: calls are graded in this thread on demand, or concurrently if they
    wait for servers."""
    window: deque[list[Sample] | Future[list[Any]]] = deque()
    with ExitStack() as closing:
        asker: HttpClient | None = None
        for call in calls:
            if grader.waits(call):
                asker = asker or closing.enter_context(HttpClient())
                window.append(asker.submit(grader.asked(call, asker)))
            else:
                window.append(call)
            while window and (len(window) >= concurrency or isinstance(window[0], list) or window[0].done()):
                yield _call_result(grader, window.popleft())
        while window:
            yield _call_result(grader, window.popleft())


def _call_result(grader: BatchedReward, call: list[Sample] | Future[list[Any]]) -> list[Any] | BaseException:
    try:
        return grader.many(call) if isinstance(call, list) else call.result()
    except Exception as error:
        return error


def _attach_rewards(
    samples: list[Sample], result: list[Any] | BaseException, settings: ScoreSettings
) -> Iterator[Sample]:
    """Attach the result of one call to its samples. Raises errors that concern more than these samples."""
    late = isinstance(result, TimeoutError)
    if isinstance(result, HookError) and " of sample " not in str(result):  # raised without knowledge of sample numbers
        raise HookError(f"{_sample_range(samples)}: {result}") from result
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
            if isinstance(reward, Grade):
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


def _sample_range(samples: list[Sample]) -> str:
    first, last = samples[0].index, samples[-1].index
    return f"sample {first}" if len(samples) == 1 else f"samples {first} to {last}"


def reward_number(sample: Sample, reward_key: str | None) -> float:
    """Return the number that is trained on. Raises HookError, naming the sample and the type of an invalid reward."""
    value: Any = sample.reward
    if isinstance(value, dict):
        if reward_key is None:
            reward_key = "score" if "score" in value else None
        if reward_key not in value:
            keys = ", ".join(map(str, value)) or "nothing"
            fault = "not set, and no 'score' is" if reward_key is None else f"{reward_key!r} is not"
            raise HookError(f"score.reward_key: {fault} in the reward of sample {sample.index} ({keys}); name one")
        value = value[reward_key]
    if isinstance(value, bool):
        value = float(value)
    if not is_number(value):
        raise HookError(
            f"reward of sample {sample.index} is {kind_of(value)}, not a finite number; mend the reward function"
            + ("" if not isinstance(sample.reward, dict) else f" (key {reward_key!r})")
        )
    return float(value)
