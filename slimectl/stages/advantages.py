"""Second and third pass over a round: outputs of the models from before its updates, and advantages from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimectl.algorithms.advantages import whitened
from slimectl.algorithms.estimators import TrainingBatch
from slimectl.algorithms.kl import kl_estimate
from slimectl.algorithms.registry import ALGORITHMS
from slimectl.protocols import Critic, Policy
from slimectl.settings import Settings
from slimectl.settings.algorithm import AlgorithmSettings
from slimectl.settings.needs import AlgorithmSection, Need
from slimectl.stages.hooks import Hooks
from slimectl.stages.score import reward_number
from slimectl.types import Metrics, Sample, TrainingSample


@dataclass(frozen=True)
class Models:
    """The models that a step updates: the policy, and the critic if there is one."""

    policy: Policy
    critic: Critic | None = None


def attach_model_outputs(
    rows: Sequence[TrainingSample], models: Models, algorithm: AlgorithmSection, hooks: Hooks, *, several_steps: bool
) -> None:
    """Write `TrainingSample.old_log_probs` and `.values` where they are needed; what a row has already is kept.

    In one step the policy does not change before the loss, which uses its own detached log-probabilities as the old
    ones, unless an advantage or a hook reads them: the same numbers with one forward pass less.
    """
    if algorithm.trains_on != "rollouts":
        return
    hooks_read = hooks.advantages is not None or hooks.post_process_rows is not None
    lacking = [row for row in rows if row.old_log_probs is None]
    if lacking and (several_steps or hooks_read or Need.OLD_LOG_PROBS in algorithm.needs):
        for row, log_probs in zip(lacking, models.policy.log_probs(lacking), strict=True):
            row.old_log_probs = log_probs
    unjudged = [row for row in rows if row.values is None]
    if unjudged and Need.CRITIC in algorithm.needs:
        assert models.critic is not None
        for row, values in zip(unjudged, models.critic.values(unjudged), strict=True):
            row.values = values


def set_advantages(batch: TrainingBatch, settings: Settings, hooks: Hooks, rollout_id: int) -> Metrics:
    """Write the advantages, by the algorithm or the user's function, then the user's changes; return the metrics."""
    if settings.algorithm.trains_on != "rollouts":
        return {}
    metrics: Metrics = {}
    if hooks.advantages is not None:
        hooks.advantages(batch.rows, batch.samples, batch.rewards)
    else:
        metrics = estimate_advantages(batch, settings.algorithm)
    if hooks.post_process_rows is not None:
        numbers = [reward_number(sample, settings.score.reward_key) for sample in batch.samples]
        hooks.post_process_rows(batch.rows, batch.samples, numbers, rollout_id)
    return metrics


def estimate_advantages(batch: TrainingBatch, algorithm: AlgorithmSettings) -> Metrics:
    """Write `TrainingSample.advantages`, and `.returns` with a critic; return the reverse KL to a teacher.

    Rows have the log-probabilities and values that the algorithm needs.
    """
    estimate = ALGORITHMS[algorithm.name].advantages
    if estimate is None or not batch.rows:
        return {}
    metrics: Metrics = {}
    token_advantages = estimate(batch, algorithm)
    if Need.CRITIC in algorithm.needs:
        for row, advantages_T in zip(batch.rows, token_advantages, strict=True):
            row.returns = (advantages_T + _tensor(row.values)).tolist()
    masks = [_tensor(row.weights) for row in batch.rows]
    if teacher := algorithm.teacher_options:
        divergences = [_teacher_kl(row, sample) for row, sample in zip(batch.rows, batch.samples, strict=True)]
        token_advantages = [
            a_T - teacher.kl_coef * kl_T for a_T, kl_T in zip(token_advantages, divergences, strict=True)
        ]
        masked_kl = torch.cat([kl_T[mask_T != 0] for kl_T, mask_T in zip(divergences, masks, strict=True)])
        metrics["train/opd_reverse_kl"] = float(masked_kl.mean()) if len(masked_kl) else 0.0
    if algorithm.whitens_advantages:
        token_advantages = whitened(token_advantages, masks)
    for row, advantages_T in zip(batch.rows, token_advantages, strict=True):
        row.advantages = advantages_T.tolist()
    return metrics


def _teacher_kl(row: TrainingSample, sample: Sample) -> Tensor:
    """Return the k1 estimate of KL(policy || teacher) at every token."""
    return kl_estimate(_tensor(row.old_log_probs), _tensor(sample.teacher_log_probs), "k1")


def _tensor(values: list[float] | None) -> Tensor:
    assert values is not None
    return torch.tensor(values, dtype=torch.float64)
