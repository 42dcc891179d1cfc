"""First pass over a round: drops samples that carry no signal, and turns the others into rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slimectl.algorithms.estimators import TrainingBatch, normalize_rewards
from slimectl.algorithms.filters import has_signal
from slimectl.algorithms.metrics import zero_std_groups
from slimectl.errors import RecordError
from slimectl.settings import Settings
from slimectl.settings.algorithm import Sft
from slimectl.settings.needs import Need
from slimectl.settings.policy_gradient import PolicyGradient
from slimectl.stages.hooks import Hooks
from slimectl.stages.preferences import build_preference_batch
from slimectl.stages.score import reward_number
from slimectl.types import Metrics, Sample, Status, TrainingSample

COLUMNS = {
    Need.REFERENCE: ("ref_log_probs", "add --reference DIR to `slimectl score`"),
    Need.TEACHER: ("teacher_log_probs", "set algorithm.opd_teacher_load or algorithm.opd_teacher_url"),
    Need.ROLLOUT_LOG_PROBS: ("rollout_log_probs", "sample with `slimectl rollout`, which records them"),
}
"""Field of a sample, and the remedy where it is missing, by need."""


def build_training_batch(
    samples: list[Sample], settings: Settings, hooks: Hooks, *, version: int
) -> tuple[TrainingBatch, Metrics]:
    """Return the rows of a round without advantages, and counts of dropped samples and groups.

    Samples that failed, or are staler than run.max_staleness at weight version `version`, are dropped. Hooks change
    the rounds of policy gradients only. Raises RecordError if a sample lacks what the algorithm needs.
    """
    algorithm, rewards = settings.algorithm, None
    count = len(samples)
    if algorithm.trains_on == "rollouts":
        hooks.filter_samples(samples)
        samples = hooks.convert(samples)
        rewards = hooks.post_process_rewards(samples)
    fresh, metrics = _select_fresh(samples, version, settings.run.max_staleness)
    if Need.GROUPS in algorithm.needs:
        require_groups(samples, algorithm.name)
    batch, drops = BUILDERS[algorithm.trains_on](
        [samples[i] for i in fresh],
        algorithm,
        settings.score.reward_key,
        None if rewards is None else [rewards[1][i] for i in fresh],
    )
    if rewards is not None and len(samples) == count:
        batch.reported_rewards = rewards[0]
    return batch, metrics | drops


def build_sft_batch(
    samples: Sequence[Sample], algorithm: Sft, reward_key: str | None, shaped: Sequence[float] | None
) -> tuple[TrainingBatch, Metrics]:
    """Return a row for every demonstration."""
    return TrainingBatch([_row(sample) for sample in samples], [sample.execution for sample in samples]), {}


def build_policy_batch(
    samples: Sequence[Sample], algorithm: PolicyGradient, reward_key: str | None, shaped: Sequence[float] | None = None
) -> tuple[TrainingBatch, Metrics]:
    """Return rows for the samples whose group carries signal, and counts of groups without it."""
    graded = _grade(samples, algorithm, reward_key, shaped)
    groups: dict[int, list[float]] = {}
    for sample, reward in zip(samples, graded.raw, strict=True):
        groups.setdefault(sample.group_index, []).append(reward)
    metrics = zero_std_groups(list(groups.values())) if Need.REWARDS in algorithm.needs else {}
    if algorithm.drop_zero_std_groups:
        groups, drops = _drop_without_signal(groups)
        metrics |= drops
    trained = [i for i, sample in enumerate(samples) if sample.group_index in groups]
    trained_samples = [samples[i] for i in trained]
    _require_columns(trained_samples, algorithm)
    rows = [_row(sample) for sample in trained_samples]
    if algorithm.use_rollout_logprobs:
        for row in rows:
            row.old_log_probs = row.rollout_log_probs
    batch = TrainingBatch(
        rows,
        [sample.execution for sample in trained_samples],
        samples=trained_samples,
        rewards=[graded.rewards[i] for i in trained],
        normalized_rewards=[graded.normalized[i] for i in trained],
        compared=shaped is not None,
        round_rewards=graded.normalized,
    )
    return batch, metrics


BUILDERS: dict[str, Callable[..., tuple[TrainingBatch, Metrics]]] = {
    "rollouts": build_policy_batch,
    "demonstrations": build_sft_batch,
    "preferences": build_preference_batch,
}
"""Builders of a batch, by what an algorithm trains on."""


@dataclass(frozen=True)
class _Grades:
    """The rewards of samples: as scored, as they are trained on, and compared within groups."""

    raw: list[float]
    rewards: list[float]
    normalized: list[float]


def _grade(
    samples: Sequence[Sample], algorithm: PolicyGradient, reward_key: str | None, shaped: Sequence[float] | None
) -> _Grades:
    """Return the rewards of samples; missing ones are 0 for an algorithm that learns from none."""
    lacking = [sample for sample in samples if sample.reward is None]
    if lacking and Need.REWARDS in algorithm.needs:
        raise RecordError(f"sample {lacking[0].index}: no reward; run `slimectl score` on these samples first")
    raw = [0.0 if sample.reward is None else reward_number(sample, reward_key) for sample in samples]
    if shaped is not None:
        return _Grades(raw, list(shaped), list(shaped))
    return _Grades(raw, raw, normalize_rewards(samples, raw, algorithm))


def _select_fresh(samples: Sequence[Sample], version: int, max_staleness: int | None) -> tuple[list[int], Metrics]:
    """Return the positions of samples that are not failed and not staler than allowed, and metrics of staleness."""
    ages = [_age(sample, version) for sample in samples]
    metrics: Metrics = {}
    if known_ages := [age for age in ages if age is not None]:
        metrics["rollout/staleness/mean"] = sum(known_ages) / len(known_ages)
        metrics["rollout/staleness/max"] = float(max(known_ages))
    answered = [i for i, sample in enumerate(samples) if sample.status is not Status.FAILED]
    if max_staleness is None:
        return answered, metrics
    fresh = [i for i in answered if (ages[i] or 0) <= max_staleness]
    if len(fresh) < len(answered):
        metrics["rollout/dynamic_filter/drop_stale"] = float(len(answered) - len(fresh))
    return fresh, metrics


def _age(sample: Sample, version: int) -> int | None:
    """Return the weight versions between the oldest token of a sample and now; None for samples of other origin."""
    versions = sample.weight_versions
    if not versions or not all(text.isdecimal() for text in versions):
        return None
    # A policy that starts anew from a trained checkpoint counts from 0 again: the age of its samples is not negative.
    return max(0, version - min(map(int, versions)))


def require_groups(samples: Sequence[Sample], name: str) -> None:
    """Raises RecordError if every group has one answer only: a comparison within groups carries no signal then."""
    executions: dict[int, set[int]] = {}
    for sample in samples:
        executions.setdefault(sample.group_index, set()).add(sample.execution)
    if all(len(members) == 1 for members in executions.values()):
        raise RecordError(
            f"group {next(iter(executions))}: one answer only; {name} compares the answers to a prompt with "
            f"one another: sample several (rollout.n_samples_per_prompt)"
        )


def _require_columns(samples: Sequence[Sample], algorithm: PolicyGradient) -> None:
    """Raises RecordError if a sample lacks log-probabilities that a setting needs."""
    for setting, need in algorithm.needs_by_setting.items():
        name, remedy = COLUMNS[need]
        lacking = [sample for sample in samples if getattr(sample, name) is None]
        if lacking:
            raise RecordError(f"sample {lacking[0].index}: no {name}, which {setting} needs; {remedy}")


def _drop_without_signal(groups: dict[int, list[float]]) -> tuple[dict[int, list[float]], Metrics]:
    """Return the groups whose rewards differ, and how many were dropped by reason."""
    retained: dict[int, list[float]] = {}
    drops: Metrics = {}
    for key, rewards in groups.items():
        keep, reason = has_signal(rewards)
        if keep:
            retained[key] = rewards
        else:
            name = f"rollout/dynamic_filter/drop_{reason}"
            drops[name] = drops.get(name, 0.0) + 1.0
    return retained, drops


def _row(sample: Sample) -> TrainingSample:
    """Return a sample as a row; its weights are the mask until the step's reduction replaces them."""
    return TrainingSample(
        tokens=sample.tokens,
        response_length=sample.response_length,
        weights=[float(bit) for bit in sample.mask()],
        ref_log_probs=sample.ref_log_probs,
        rollout_log_probs=sample.rollout_log_probs,
        group=sample.group_index,
    )
