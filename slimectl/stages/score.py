"""The score stage: grades samples, and attaches log-probabilities of frozen models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from slimectl.algorithms.scoring import REFERENCE, ScoringPass
from slimectl.data.images import images_of
from slimectl.data.json_values import NONE_REMEDY, kind_of
from slimectl.data.streams import batched
from slimectl.data.turn_rewards import checked_turn_rewards
from slimectl.errors import HookError, RecordError, SlimectlError
from slimectl.plugins.callables import error_location
from slimectl.plugins.containment import in_one_line
from slimectl.protocols import Executor, LogProbModel
from slimectl.rewards import TOTAL, Grade, components, part_weights
from slimectl.rewards.base import is_number
from slimectl.settings.needs import AlgorithmSection
from slimectl.settings.rollout_algorithms import Gdpo
from slimectl.settings.score import ScoreSettings
from slimectl.stages.grader import Grader, as_batched
from slimectl.stages.grading_calls import GradingCalls
from slimectl.stages.teachers import AlignedTeacher
from slimectl.stages.text_responses import prompt_of
from slimectl.system.liveness import note_progress
from slimectl.system.stdio import logger
from slimectl.types import Prompt, Sample, Status, TopTokens, TrainingSample

BATCH = 64
"""Samples per forward pass of the model."""


def attach_log_probs(
    samples: Iterable[Sample],
    model: LogProbModel,
    scoring: ScoringPass,
    *,
    recompute: bool = False,
    temperature: float = 1.0,
) -> Iterator[Sample]:
    """Yield every sample with the log-probabilities of its response under `model`, in the field of the pass.

    Existing values are kept, unless `recompute` is set. The model's log-probabilities are at `temperature`.
    """
    for batch in batched(samples, BATCH):
        score_rows(batch, model, scoring, recompute=recompute, temperature=temperature)
        yield from batch


def score_rows(
    samples: Sequence[Sample],
    model: LogProbModel | AlignedTeacher,
    scoring: ScoringPass,
    *,
    recompute: bool,
    temperature: float,
    render: Callable[[Prompt], list[int]] | None = None,
) -> None:
    """Attach log-probabilities to the samples of a round, like `attach_log_probs`.

    `render` returns the tokens of a prompt, for passes with prompts in place of the samples' own.
    """
    missing = [
        (sample, tokens)
        for sample, tokens in zip(samples, _tokens(samples, scoring, render), strict=True)
        if tokens is not None and (recompute or getattr(sample, scoring.field) is None)
    ]
    for batch in batched(missing, BATCH):
        for (sample, _), score in zip(batch, _scores(batch, model, scoring.top_k), strict=True):
            setattr(sample, scoring.field, score)
            if scoring.field == "ref_log_probs":
                sample.ref_temperature = temperature


def _tokens(
    samples: Sequence[Sample], scoring: ScoringPass, render: Callable[[Prompt], list[int]] | None
) -> Sequence[list[int] | None]:
    """Return a prompt that ends with its response for each sample that a pass scores, else None."""
    scored_tokens = scoring.tokens(samples)
    if scoring.prompts is None:
        return scored_tokens
    assert render is not None, "a pass with prompts needs the tokenizer"
    return [
        None if tokens is None or prompt is None
        else [*render(replace(prompt_of(sample), text=prompt)), *sample.tokens[sample.prompt_length :]]
        for sample, tokens, prompt in zip(samples, scored_tokens, scoring.prompts(samples), strict=True)
    ]  # fmt: skip


def _scores(
    batch: Sequence[tuple[Sample, list[int]]], model: LogProbModel | AlignedTeacher, top_k: int | None
) -> Sequence[list[float] | list[TopTokens]]:
    """Return what a model says of the responses to these tokens: log-probabilities, or the likeliest tokens."""
    if isinstance(model, AlignedTeacher):
        return model.sample_log_probs([sample for sample, _ in batch])
    rows = [
        TrainingSample(tokens, s.response_length, [0.0] * s.response_length, group=s.group_index, images=images_of(s))
        for s, tokens in batch
    ]
    return model.log_probs(rows) if top_k is None else model.top_log_probs(rows, top_k)


__all__ = ["Grader", "report_grading", "reward_number", "score"]

NO_REWARD = "no_reward"
"""Metadata key with the reason why a sample has no reward."""


Skip = Callable[[Sample, RecordError], None]
"""Called with a sample that cannot be graded, and the error."""


def score(
    samples: Iterable[Sample],
    reward: Callable[[Sample], Any],
    settings: ScoreSettings,
    *,
    executor: Executor,
    reference: LogProbModel | None = None,
    temperature: float = 1.0,
    skip: Skip | None = None,
) -> Iterator[Sample]:
    """Grade every sample in order. A `reference` also attaches its log-probabilities at `temperature`.

    `reward` returns a number, a dict from which settings.reward_key picks one, or a Grade, whose explanation is
    stored in metadata.explanation. The key turn_rewards of a dict is stored in the sample's field. A Grader also
    grades many samples in one call and waits for many servers concurrently. It reads up to settings.concurrency calls
    ahead from `samples`.

    With settings.none_reward = "skip" a sample whose reward is None keeps no reward, and metadata.no_reward has the
    reason. A sample that exceeded its time limit twice gets reward 0, and metadata.reward_error has the reason. A
    sample whose attempt failed gets reward 0 too. A sample that cannot be graded because of its record (no label, an
    unknown verifier) is passed to `skip` with the error and not yielded. Without `skip`, RecordError is raised. Raises
    HookError if the reward is not a finite number, or not a dict with one under `settings.reward_key`.
    """
    graded = _grade_samples(samples, reward, settings, executor, skip)
    if reference is not None:
        graded = attach_log_probs(graded, reference, REFERENCE, recompute=True, temperature=temperature)
    yield from graded


def _grade_samples(
    samples: Iterable[Sample],
    reward: Callable[[Sample], Any],
    settings: ScoreSettings,
    executor: Executor,
    skip: Skip | None,
) -> Iterator[Sample]:
    grader = as_batched(reward)
    calls = GradingCalls(grader, settings, executor)
    for call, result in calls.results(grader.calls(samples)):
        note_progress()
        if skip is not None and isinstance(result, RecordError):
            for sample in call:
                if len(call) == 1 or settings.group_rm:
                    skip(sample, result)
                else:  # only one sample of the batch is at fault, so grade the others
                    yield from _grade_samples([sample], reward, settings, executor, skip)
            continue
        if isinstance(result, ChildProcessError):
            raise HookError(
                f"{_sample_range(call)}: {_prefix(reward, call[0])}{result}. Fix it, or give it more memory"
            )
        yield from _attach_rewards(call, result, settings, reward)


def _attach_rewards(
    samples: list[Sample], result: list[Any] | BaseException, settings: ScoreSettings, grader: Callable[[Sample], Any]
) -> Iterator[Sample]:
    """Attach the result of one call to its samples. Raises errors that concern more than these samples."""
    late = isinstance(result, TimeoutError)
    if isinstance(result, HookError) and " of sample " not in str(
        result
    ):  # raised by code that does not know the sample numbers
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
            raise grading_error(grader, sample, result) from result
        else:
            explanation = None
            if isinstance(reward, Grade):
                explanation, reward = reward.to_json(), reward.reward
            try:
                number = _number(reward, settings.reward_key, sample, skip_none=settings.none_reward == "skip")
            except HookError as error:  # the sample keeps its earlier reward
                raise HookError(f"{_prefix(grader, sample)}{error}") from None
            if isinstance(reward, dict) and "turn_rewards" in reward:
                reward = dict(reward)
                sample.turn_rewards = _turn_rewards(reward.pop("turn_rewards"), _prefix(grader, sample), sample)
            sample.reward = None if number is None else reward
            sample.metadata.pop(NO_REWARD, None)
            if number is None:
                name = grader.name_of(sample) if isinstance(grader, Grader) else "the reward function"
                sample.metadata[NO_REWARD] = f"{name} returned None"
            if explanation is not None:
                sample.metadata["explanation"] = explanation
        yield sample


def grading_error(grader: Callable[[Sample], Any], sample: Sample, error: BaseException) -> HookError:
    """Return the error for an exception of a verifier or a reward function, with its name, file and line."""
    module = grader.__module__
    if isinstance(grader, Grader) and not grader.runs_user_code(sample):
        verifier = grader.verifier_of(sample)
        module = type(getattr(verifier, "inner", verifier)).__module__
    location = error_location(error, module)
    place = f" ({location})" if location else ""
    return HookError(f"{_prefix(grader, sample)}reward of sample {sample.index}: {in_one_line(error)}{place}")


def _prefix(grader: Callable[[Sample], Any], sample: Sample) -> str:
    """Return the prefix of an error that names the sample's grader, or "" for a plain function."""
    return f"{grader.name_of(sample)}: " if isinstance(grader, Grader) else ""


def report_grading(
    samples: Sequence[Sample], settings: ScoreSettings, name: str, *, max_share: float | None = None
) -> None:
    """Warn about samples without a reward, and samples whose grading exceeded its time limit.

    `name` identifies the samples in the warning. Raises SlimectlError if the time limit was exceeded for more than
    `max_share` of all samples.
    """
    if unrewarded := [sample for sample in samples if sample.has_no_reward]:
        logger.warning(
            f"{name}: {len(unrewarded)} of {len(samples)} samples have no reward: every reward function returned None, "
            f"the first time for sample {unrewarded[0].index}"
        )
    late = sum("reward_error" in sample.metadata for sample in samples)
    if not late:
        return
    message = (
        f"{name}: grading {late} of {len(samples)} samples exceeded score.timeout_s = {settings.timeout_s:g} s of CPU "
        f"time, or {settings.wall_limit_s:g} s of wall time, twice"
    )
    if max_share is not None and late > max_share * len(samples):
        raise SlimectlError(
            f"{message}, more than run.max_reward_timeouts = {max_share:g} of them. Find the cause with "
            f"`slimectl score --check`, or raise a limit, and continue with --resume RUN"
        )
    logger.warning(f"{message}: their reward is 0")


def _turn_rewards(value: Any, prefix: str, sample: Sample) -> list[Any] | None:
    """Return the turn rewards of a reward function. Raises HookError if they have another form."""
    try:
        return None if value is None else checked_turn_rewards(value)
    except ValueError as error:
        raise HookError(f"{prefix}turn_rewards of sample {sample.index}: {error}. Fix the reward function") from None


def _sample_range(samples: list[Sample]) -> str:
    first, last = samples[0].index, samples[-1].index
    return f"sample {first}" if len(samples) == 1 else f"samples {first} to {last}"


def reward_number(sample: Sample, reward_key: str | None) -> float:
    """Return the number to train on. Raises HookError with the sample and the type of an invalid reward."""
    number = _number(sample.reward, reward_key, sample)
    assert number is not None
    return number


def component_weights(algorithm: AlgorithmSection, settings: ScoreSettings) -> dict[str, float]:
    """Return the weight of each component of the reward that the algorithm compares. Components of weight 0 are not."""
    if not isinstance(algorithm, Gdpo):
        return {}
    weights = algorithm.gdpo_weights or part_weights(settings.rm)
    return {name: weight for name, weight in weights.items() if weight}


def component_columns(samples: Sequence[Sample], names: Iterable[str]) -> dict[str, list[float | None]]:
    """Return the values of the named components of the samples' rewards. None is a part without an opinion.

    Samples that failed, or exceeded their time limit, have 0 in every component. Raises RecordError for a reward
    without a component.
    """
    return {name: [_component(sample, name) for sample in samples] for name in names}


def _component(sample: Sample, name: str) -> float | None:
    if sample.status is Status.FAILED or "reward_error" in sample.metadata:
        return 0.0
    reward = sample.reward if isinstance(sample.reward, dict) else {}
    value = reward.get(name)
    if name in reward and (value is None or is_number(value)):
        return None if value is None else float(value)
    fault = f"component {name!r} is {kind_of(value)}, not a number" if name in reward else f"no component {name!r}"
    raise RecordError(
        f"sample {sample.index}: reward: {fault}. The components are {', '.join(components(reward)) or 'none'}. "
        f"Return it for every sample (None means no opinion), or set algorithm.gdpo_weights to components that all have"
    )


def _number(reward: Any, reward_key: str | None, sample: Sample, *, skip_none: bool = False) -> float | None:
    """Return the number of a reward, or None for None with `skip_none`. Raises HookError."""
    value = reward
    if isinstance(value, dict):
        if reward_key is None:
            reward_key = TOTAL if TOTAL in value else None
        if reward_key not in value:
            keys = ", ".join(map(str, value)) or "nothing"
            fault = "not set, and no 'score' is" if reward_key is None else f"{reward_key!r} is not"
            raise HookError(
                f"score.reward_key: {fault} in the reward of sample {sample.index} ({keys}). Set it to one of them"
            )
        value = value[reward_key]
    if value is None and skip_none:
        return None
    if isinstance(value, bool):
        value = float(value)
    if not is_number(value):
        key = f" (key {reward_key!r})" if isinstance(reward, dict) else ""
        hint = NONE_REMEDY if value is None else ""
        fault = f"reward of sample {sample.index} is {kind_of(value)}, not a finite number"
        raise HookError(f"{fault}. Fix the reward function{key}{hint}")
    return float(value)
