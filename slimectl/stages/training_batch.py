"""Builds the rows of a round for an algorithm: sample filters, log-probabilities, loss and reduction weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from slimectl.algorithms.filters import has_signal
from slimectl.algorithms.importance_sampling import importance_weights, self_normalization
from slimectl.algorithms.losses import PolicyLoss, SftLoss
from slimectl.algorithms.metrics import zero_std_groups
from slimectl.algorithms.preferences import LinearizedLoss
from slimectl.algorithms.reductions import Reduction, token_weights
from slimectl.errors import RecordError
from slimectl.protocols import Critic, Loss
from slimectl.settings.algorithm import Opd, Pairwise, PolicyGradient, Sft
from slimectl.stages.advantages import set_advantages, set_values
from slimectl.stages.score import reward_number
from slimectl.types import Metrics, Sample, TrainingSample

Estimator = Callable[[Sequence[TrainingSample], Sequence[Sample], Sequence[float]], None]
"""Called with (rows, samples, rewards); writes `TrainingSample.advantages`."""

LOSS_SETTINGS = {field.name for field in fields(PolicyLoss)}
"""Arguments of PolicyLoss; the settings of an algorithm have the same names."""


def loss_of(algorithm: PolicyGradient | Pairwise | Sft, rows: Sequence[TrainingSample]) -> Loss:
    """Return the token loss of the algorithm for a step over `rows`."""
    if isinstance(algorithm, Sft):
        return SftLoss()
    if isinstance(algorithm, Pairwise):
        return LinearizedLoss()
    total = math.fsum(weight for row in rows for weight in row.weights)
    loss = PolicyLoss(
        surrogate=algorithm.surrogate,
        report_scale=1 / total if total else 1.0,
        **algorithm.model_dump(include=LOSS_SETTINGS),
    )
    if algorithm.use_tis and algorithm.tis_batch_normalize:
        return replace(loss, tis_scale=1 / _mean_weight(rows, algorithm))
    return loss


def _mean_weight(rows: Sequence[TrainingSample], algorithm: PolicyGradient) -> float:
    """Return the mean importance weight of a step; its rows have old and rollout log-probabilities."""
    old_T = torch.tensor([value for row in rows for value in row.old_log_probs or []], dtype=torch.float64)
    rollout_T = torch.tensor([value for row in rows for value in row.rollout_log_probs or []], dtype=torch.float64)
    mask_T = torch.tensor([weight != 0 for row in rows for weight in row.weights], dtype=torch.bool)
    row_T = torch.tensor([i for i, row in enumerate(rows) for _ in row.weights], dtype=torch.long)
    weights_T, _ = importance_weights(
        old_T,
        rollout_T,
        mask_T,
        row_T,
        len(rows),
        level=algorithm.tis_level,
        mode=algorithm.tis_mode,
        low=algorithm.tis_clip_low,
        high=algorithm.tis_clip,
        veto=algorithm.tis_veto,
    )
    return self_normalization(weights_T, mask_T, row_T, len(rows), level=algorithm.tis_level)


def set_loss_weights(
    rows: Sequence[TrainingSample], executions: Sequence[int], algorithm: PolicyGradient | Pairwise | Sft
) -> None:
    """Replace the masks in `TrainingSample.weights` by the loss weights of a step: its reduction, with denominators.

    A pair's loss is a function of sums over its tokens: each token weighs one over the number of pairs.
    """
    masks = [[int(weight != 0) for weight in row.weights] for row in rows]
    if isinstance(algorithm, Pairwise):
        weights = token_weights(masks, executions, kind="fixed_length", fixed_length=1)
    elif algorithm.calculate_per_token_loss:
        weights = token_weights(masks, executions, kind="per_token")
    else:
        fixed = algorithm.fixed_length if isinstance(algorithm, PolicyGradient) else None
        kind: Reduction = "fixed_length" if fixed else "rollout_mean"
        weights = token_weights(masks, executions, kind=kind, fixed_length=fixed)
    for row, row_weights in zip(rows, weights, strict=True):
        row.weights = row_weights


def require_groups(samples: Sequence[Sample], algorithm: PolicyGradient) -> None:
    """Raises RecordError if every group has one answer only: a comparison within groups carries no signal then."""
    executions: dict[int, set[int]] = {}
    for sample in samples:
        executions.setdefault(sample.group_index, set()).add(sample.execution)
    if algorithm.baseline != "none" and all(len(members) == 1 for members in executions.values()):
        raise RecordError(
            f"group {next(iter(executions))}: one answer only; {algorithm.name} compares the answers to a prompt with "
            f"one another: sample several (rollout.n_samples_per_prompt)"
        )


def build_sft_batch(samples: Sequence[Sample]) -> list[TrainingSample]:
    return [_row(sample) for sample in samples]


@dataclass
class TrainingBatch:
    """Rows of a round with the samples and rewards from which they came, in parallel."""

    samples: list[Sample]
    rows: list[TrainingSample]
    rewards: list[float]
    metrics: Metrics
    """Counts of dropped groups, and of those without signal."""


def build_policy_batch(
    samples: Sequence[Sample],
    algorithm: PolicyGradient,
    *,
    reward_key: str | None,
    log_probs: Callable[[Sequence[TrainingSample]], list[list[float]]],
    critic: Critic | None = None,
    custom: Estimator | None = None,
    shaped: Sequence[float] | None = None,
) -> TrainingBatch:
    """Return the samples that carry signal, their rows with advantages, and counts of dropped groups.

    `log_probs` is the policy's forward pass over rows, called only if an advantage depends on it; ppo needs a
    `critic`. A `custom` estimator writes the advantages instead of the algorithm's. `shaped` has a reward for each
    sample that becomes its advantage without a comparison with siblings. Raises RecordError if a sample lacks a
    reward, or log-probabilities that a setting needs.
    """
    rewards = _rewards(samples, reward_key, needed=not isinstance(algorithm, Opd))
    groups: dict[int, list[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        groups.setdefault(sample.group_index, []).append(reward)
    metrics: Metrics = {} if isinstance(algorithm, Opd) else zero_std_groups(list(groups.values()))
    if algorithm.drop_zero_std_groups:
        groups, drops = _drop_without_signal(groups)
        metrics |= drops
    trained = [i for i, sample in enumerate(samples) if sample.group_index in groups]
    numbers = [(rewards if shaped is None else shaped)[i] for i in trained]
    trained_samples = [samples[i] for i in trained]
    rows = [_row(sample) for sample in trained_samples]
    _require_log_probs(trained_samples, algorithm)
    if algorithm.use_rollout_logprobs:
        for row in rows:
            row.old_log_probs = row.rollout_log_probs
    elif (algorithm.kl_coef or algorithm.opd_kl_coef or custom) and rows:
        for row, old in zip(rows, log_probs(rows), strict=True):
            row.old_log_probs = old
    if critic is not None:
        set_values(rows, critic)
    if custom is not None:
        custom(rows, trained_samples, numbers)
    else:
        metrics |= set_advantages(rows, trained_samples, numbers, algorithm, compare=shaped is None)
    return TrainingBatch(trained_samples, rows, numbers, metrics)


def _rewards(samples: Sequence[Sample], reward_key: str | None, *, needed: bool) -> list[float]:
    """Return the reward of each sample; missing ones are 0 if no reward is `needed`."""
    lacking = [sample for sample in samples if sample.reward is None]
    if lacking and needed:
        raise RecordError(f"sample {lacking[0].index}: no reward; run `slimectl score` on these samples first")
    return [0.0 if sample.reward is None else reward_number(sample, reward_key) for sample in samples]


def _require_log_probs(samples: Sequence[Sample], algorithm: PolicyGradient) -> None:
    """Raises RecordError if a sample lacks log-probabilities that a setting needs."""
    sampled = "sample with `slimectl rollout`, which records them"
    reference = "add --reference DIR to `slimectl score`"
    teacher = "set algorithm.opd_teacher_load or algorithm.opd_teacher_url"
    requirements = {
        "algorithm.kl_coef": (algorithm.kl_coef > 0, "ref_log_probs", reference),
        "algorithm.kl_loss_coef": (algorithm.kl_loss_coef > 0, "ref_log_probs", reference),
        "algorithm.opd_kl_coef": (algorithm.opd_kl_coef > 0, "teacher_log_probs", teacher),
        "algorithm.use_tis": (algorithm.use_tis, "rollout_log_probs", sampled),
        "algorithm.use_rs": (algorithm.use_rs, "rollout_log_probs", sampled),
        "algorithm.use_rollout_logprobs": (algorithm.use_rollout_logprobs, "rollout_log_probs", sampled),
    }
    for setting, (needed, name, way_out) in requirements.items():
        lacking = [sample for sample in samples if needed and getattr(sample, name) is None]
        if lacking:
            raise RecordError(f"sample {lacking[0].index}: no {name}, which {setting} needs; {way_out}")


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
    """Return a sample as a row; its weights are the mask until `set_loss_weights` applies the step's reduction."""
    return TrainingSample(
        tokens=sample.tokens,
        response_length=sample.response_length,
        weights=[float(bit) for bit in sample.mask()],
        ref_log_probs=sample.ref_log_probs,
        rollout_log_probs=sample.rollout_log_probs,
        group=sample.group_index,
    )
