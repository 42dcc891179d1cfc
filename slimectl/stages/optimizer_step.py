"""Fourth pass: one optimizer step of policy and critic over the rows of a minibatch, and its per-token records."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimectl.algorithms.losses import PolicyLoss, WatchedLoss
from slimectl.algorithms.reductions import token_weights
from slimectl.algorithms.registry import ALGORITHMS
from slimectl.algorithms.surrogates import TokenRows, ratio
from slimectl.algorithms.value_loss import explained_variance
from slimectl.settings.algorithm import AlgorithmSettings
from slimectl.settings.needs import AlgorithmSection, Need
from slimectl.stages.advantages import Models
from slimectl.stages.finite_check import FiniteCheck
from slimectl.stages.hooks import Hooks
from slimectl.stages.preferences import sample_ids, set_preference_gradients
from slimectl.types import Loss, Metrics, TrainingSample

METRIC_ALIASES = {
    "pg_clipfrac": "clipfrac", "kl_loss": "kl",
    "critic-value_loss": "value_loss", "critic-value_clipfrac": "value_clipfrac",
}  # fmt: skip
"""Metrics that are reported under a second name."""


@dataclass(frozen=True)
class StepIndex:
    """Position of an optimizer step in a run."""

    step: int
    rollout_id: int
    step_in_round: int = 0


def optimizer_step(
    minibatch: Sequence[tuple[int, TrainingSample]],
    models: Models,
    algorithm: AlgorithmSettings,
    hooks: Hooks,
    index: StepIndex,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> Metrics:
    """Set the loss weights of rows, update policy and critic, and return the metrics. Raises DivergedError.

    A minibatch has (execution, row) of whole rollouts. `keep` gets the record of every row in a policy update.
    """
    functions = ALGORITHMS[algorithm.name]
    rows, executions = [row for _, row in minibatch], [execution for execution, _ in minibatch]
    rollouts = rollouts_of(minibatch)
    for row, weights in zip(rows, loss_weights([row.loss_weights for row in rows], rollouts, algorithm), strict=True):
        row.loss_weights = weights
    hooks.before_step(models.policy, index.rollout_id, index.step_in_round)
    finite = FiniteCheck(rows, sample_ids(executions, algorithm), index.rollout_id, index.step)
    outputs = models.outputs(algorithm)
    pair_metrics: Metrics = {}
    if Need.PAIRS in algorithm.needs:
        pair_metrics = set_preference_gradients(rows, algorithm, outputs)
        finite.check(pair_metrics, "train/loss", of="the pairs'", outputs=outputs)
    finite.check_rows()
    metrics = _sample_counts([row.loss_weights for row in rows])
    size = {"train/global_batch_size": float(len(set(rollouts)))}
    options = algorithm.critic_options
    if options is not None:
        metrics |= _critic_step(rows, models, algorithm, finite)
        if index.step <= algorithm.critic_only_steps:
            return metrics | size
    loss = functions.loss(algorithm, rows)
    if isinstance(loss, PolicyLoss) and hooks.loss is not None:
        loss = WatchedLoss(hooks.loss, loss)
    elif isinstance(loss, PolicyLoss) and hooks.policy_loss is not None:
        loss = hooks.policy_loss(loss, rows, rollouts)
    if options is not None and options.shared and functions.joint_loss is not None:
        loss = functions.joint_loss(algorithm, rows, loss)
    if keep is not None and algorithm.trained_output == "log_probs":
        with models.timer.time("perf/train_data_time"):
            for record in train_records(rows, executions, models.policy.log_probs(rows), loss, step=index.step):
                keep(record)
    with models.timer.time("perf/actor_train_time", of=models.policy):
        summed = finite.update(models.policy, loss, of="the", outputs=outputs)
    models.timer.count_training(rows)
    metrics |= _entropy_metrics(rows, summed, index)
    metrics |= {f"train/{name}": value for name, value in summed.items()}
    aliases = {f"train/{alias}": f"train/{name}" for name, alias in METRIC_ALIASES.items()}
    return metrics | {alias: metrics[name] for alias, name in aliases.items() if name in metrics} | pair_metrics | size


def rollouts_of(rows: Sequence[tuple[int, TrainingSample]]) -> list[tuple[int, int]]:
    """Return (group, execution) of each (execution, row). Files may number the samples of each group from 0."""
    return [(row.group, execution) for execution, row in rows]


def _entropy_metrics(rows: Sequence[TrainingSample], summed: Metrics, index: StepIndex) -> Metrics:
    """Return the mean entropy of a step's tokens, if the policy has not been updated in this round."""
    total = summed.pop("token_entropy", None)
    if total is None or index.step_in_round:
        return {}
    return {"rollout/entropy": total / sum(weight != 0 for row in rows for weight in row.loss_weights)}


def loss_weights(
    masks: Sequence[Sequence[float]], executions: Sequence[Hashable], algorithm: AlgorithmSection
) -> list[list[float]]:
    """Return the loss weights of a step for tokens whose mask is not 0. They include the whole reduction."""
    kind, fixed_length = algorithm.reduction
    bits = [[int(value != 0) for value in mask] for mask in masks]
    return token_weights(bits, executions, kind=kind, fixed_length=fixed_length)


def _sample_counts(weights: Sequence[Sequence[float]]) -> Metrics:
    """Return the number of samples of a step with a trained token, and their share of the non-empty samples."""
    answered = sum(len(row_weights) > 0 for row_weights in weights)
    valid = sum(any(row_weights) for row_weights in weights)
    return {"train/valid_samples": float(valid), "train/valid_sample_ratio": valid / answered if answered else 0.0}


def _critic_step(
    rows: Sequence[TrainingSample], models: Models, algorithm: AlgorithmSettings, finite: FiniteCheck
) -> Metrics:
    """Update a separate critic on rows with values and returns. Return its metrics train/critic-….

    A shared critic is updated with the policy, so only its explained variance is measured. Raises DivergedError before
    the update if the loss or gradient is not finite.
    """
    make_loss, options = ALGORITHMS[algorithm.name].critic_loss, algorithm.critic_options
    assert models.critic is not None
    assert make_loss is not None
    metrics: Metrics = {}
    if options is not None and not options.shared:
        loss = make_loss(algorithm, rows)
        with models.timer.time("perf/critic_train_time", of=models.critic):
            summed = finite.update(models.critic, loss, of="the critic's", outputs=models.critic.values)
        metrics = {f"train/critic-{name}": value for name, value in summed.items()}
    values = [torch.tensor(row.values, dtype=torch.float64) for row in rows]
    returns = [torch.tensor(row.returns, dtype=torch.float64) for row in rows]
    masks = [torch.tensor(row.loss_weights) for row in rows]
    return metrics | {"train/critic-explained_variance": explained_variance(values, returns, masks)}


COLUMNS = ("rollout_log_probs", "ref_log_probs", "values", "returns", "advantages")
"""Lists of a row that are copied into its record if they exist."""


def train_records(
    rows: Sequence[TrainingSample],
    executions: Sequence[int],
    log_probs: Sequence[list[float]],
    loss: Loss,
    *,
    step: int,
) -> Iterator[dict[str, Any]]:
    """Yield a record for every row of a step: a sample with a list per column and a value per token.

    `log_probs` come from the policy before the update. The ratio is the one that the loss clips, which is the
    sequence's for gspo. For a loss of the user, it is unknown which tokens are clipped.
    """
    clipped_by_row = _clipped(rows, log_probs, loss)
    for row, execution, current, (ratios, clipped) in zip(rows, executions, log_probs, clipped_by_row, strict=True):
        record: dict[str, Any] = {
            "group_index": row.group,
            "index": execution if row.index is None else row.index,
            "rollout_id": execution,
            "tokens": row.tokens,
            "response_length": row.response_length,
            "loss_mask": [int(weight != 0) for weight in row.loss_weights],
            "reward": row.reward,
            "step": step,
            "log_probs": current,
            "old_log_probs": current if row.old_log_probs is None else row.old_log_probs,
            "loss_weights": row.loss_weights,
            "ratios": ratios,
        }
        if clipped is not None:
            record["clipped"] = clipped
        yield record | {name: values for name in COLUMNS if (values := getattr(row, name))}


def _clipped(
    rows: Sequence[TrainingSample], log_probs: Sequence[list[float]], loss: Loss
) -> Iterator[tuple[list[float], list[int] | None]]:
    """Yield the ratio of every token of a row, and 1 where its loss is clipped, or None if that is unknown."""
    for row, current in zip(rows, log_probs, strict=True):
        logprobs_T = _tensor(current)
        old_T = logprobs_T if row.old_log_probs is None else _tensor(row.old_log_probs)
        if not isinstance(loss, PolicyLoss) or len(row.advantages) != row.response_length:
            yield ratio(logprobs_T, old_T).tolist(), None
            continue
        token_rows = TokenRows(_tensor(row.loss_weights) != 0, torch.zeros(len(old_T), dtype=torch.long), 1)
        bounded_T = loss.surrogate.policy_logprobs(logprobs_T, old_T, token_rows)
        _, clipped_T = loss.surrogate(bounded_T, old_T, _tensor(row.advantages), token_rows)
        yield ratio(bounded_T, old_T).tolist(), clipped_T.int().tolist()


def _tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
