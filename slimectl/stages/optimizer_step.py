"""Fourth pass: one optimizer step of policy and critic over the rows of a minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slimectl.algorithms.losses import PolicyLoss
from slimectl.algorithms.reductions import token_weights
from slimectl.algorithms.registry import ALGORITHMS
from slimectl.algorithms.value_loss import explained_variance
from slimectl.settings import Settings
from slimectl.settings.needs import AlgorithmSection, Need
from slimectl.stages.advantages import Models
from slimectl.stages.finite_check import FiniteCheck
from slimectl.stages.hooks import Hooks
from slimectl.stages.preferences import sample_ids, set_preference_gradients
from slimectl.types import Loss, Metrics, TrainingSample

METRIC_ALIASES = {"pg_clipfrac": "clipfrac", "kl_loss": "kl"}
"""Metrics that are reported under a second name."""


@dataclass(frozen=True)
class StepIndex:
    """The place of an optimizer step in a run."""

    step: int
    rollout_id: int
    step_in_round: int = 0


def optimizer_step(
    rows: Sequence[TrainingSample],
    executions: Sequence[int],
    models: Models,
    settings: Settings,
    hooks: Hooks,
    index: StepIndex,
) -> Metrics:
    """Set the loss weights of `rows`, update policy and critic, and return the metrics. Raises DivergedError."""
    set_loss_weights(rows, executions, settings.algorithm)
    hooks.before_step(models.policy, index.rollout_id, index.step_in_round)
    loss = _make_loss(rows, executions, settings, hooks)
    return _sample_counts(rows) | _update(rows, executions, models, settings, loss, index)


def set_loss_weights(rows: Sequence[TrainingSample], executions: Sequence[int], algorithm: AlgorithmSection) -> None:
    """Replace the masks in `TrainingSample.weights` by the loss weights of a step: its reduction, with denominators."""
    masks = [[int(weight != 0) for weight in row.weights] for row in rows]
    kind, fixed_length = algorithm.reduction
    weights = token_weights(masks, executions, kind=kind, fixed_length=fixed_length)
    for row, row_weights in zip(rows, weights, strict=True):
        row.weights = row_weights


def _sample_counts(rows: Sequence[TrainingSample]) -> Metrics:
    """Return the number of samples of a step with a token that is trained on, and their share of non-empty ones."""
    answered = sum(row.response_length > 0 for row in rows)
    valid = sum(any(row.weights) for row in rows)
    return {"train/valid_samples": float(valid), "train/valid_sample_ratio": valid / answered if answered else 0.0}


def _update(
    rows: Sequence[TrainingSample],
    executions: Sequence[int],
    models: Models,
    settings: Settings,
    loss: Loss,
    index: StepIndex,
) -> Metrics:
    policy, critic, algorithm = models.policy, models.critic, settings.algorithm
    finite = FiniteCheck(rows, sample_ids(executions, algorithm), index.rollout_id, index.step)
    outputs = policy.log_probs if algorithm.trained_output == "log_probs" or critic is None else critic.values
    pair_metrics: Metrics = {}
    if Need.PAIRS in algorithm.needs:
        pair_metrics = set_preference_gradients(rows, algorithm, outputs)
        finite.check(pair_metrics, "train/loss", of="the pairs'", outputs=outputs)
    finite.check_rows()
    metrics: Metrics = {}
    if options := algorithm.critic_options:
        metrics = _critic_step(rows, models, settings, finite)
        if not options.shared and index.step <= options.only_steps:
            return metrics
    summed = finite.update(policy, loss, of="the", outputs=outputs)
    summed |= {alias: summed[name] for name, alias in METRIC_ALIASES.items() if name in summed}
    return metrics | {f"train/{name}": value for name, value in summed.items()} | pair_metrics


def _make_loss(rows: Sequence[TrainingSample], executions: Sequence[int], settings: Settings, hooks: Hooks) -> Loss:
    """Return the loss of the algorithm for a step, or the user's, with the critic's beside it if they share a model."""
    algorithm, options = ALGORITHMS[settings.algorithm.name], settings.algorithm.critic_options
    custom_loss = hooks.loss if settings.algorithm.trains_on == "rollouts" else None
    loss = custom_loss or algorithm.loss(settings.algorithm, rows)
    if isinstance(loss, PolicyLoss):
        loss = hooks.policy_loss(loss, rows, executions)
    if options is not None and options.shared and algorithm.joint_loss is not None:
        loss = algorithm.joint_loss(settings.algorithm, loss)
    return loss


def _critic_step(rows: Sequence[TrainingSample], models: Models, settings: Settings, finite: FiniteCheck) -> Metrics:
    """Update a separate critic on rows with values and returns; return its metrics train/critic-….

    A shared one is updated with the policy: its explained variance alone is measured. Raises DivergedError, before the
    update, if loss or gradient are not finite.
    """
    make_loss, options = ALGORITHMS[settings.algorithm.name].critic_loss, settings.algorithm.critic_options
    assert models.critic is not None
    assert make_loss is not None
    metrics: Metrics = {}
    if options is not None and not options.shared:
        loss = make_loss(settings.algorithm)
        summed = finite.update(models.critic, loss, of="the critic's", outputs=models.critic.values)
        metrics = {f"train/critic-{name}": value for name, value in summed.items()}
    values = [torch.tensor(row.values, dtype=torch.float64) for row in rows]
    returns = [torch.tensor(row.returns, dtype=torch.float64) for row in rows]
    masks = [torch.tensor(row.weights) for row in rows]
    return metrics | {"train/critic-explained_variance": explained_variance(values, returns, masks)}
