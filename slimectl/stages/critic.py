"""The critic's part of a training step: values, optimizer step, explained variance."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slimectl.algorithms.values import ValueLoss, explained_variance
from slimectl.ports import Critic
from slimectl.settings.algorithm import Ppo
from slimectl.stages.finite import FiniteCheck
from slimectl.types import Metrics, Row


def set_values(rows: Sequence[Row], critic: Critic) -> None:
    """Write `Row.values`: the critic's predictions before the updates of the round."""
    if rows:
        for row, values in zip(rows, critic.values(rows), strict=True):
            row.values = values


def critic_step(rows: Sequence[Row], critic: Critic, algorithm: Ppo, finite: FiniteCheck) -> Metrics:
    """Make one optimizer step over rows with loss weights, values and returns; return the metrics train/critic-…

    Raises DivergedError, before the update, if loss or gradient are not finite.
    """
    summed = finite.update(critic, ValueLoss(algorithm.value_clip), of="the critic's", outputs=critic.values)
    metrics = {f"train/critic-{name}": value for name, value in summed.items()}
    return metrics | explained(rows)


def explained(rows: Sequence[Row]) -> Metrics:
    """Return the explained variance of the returns by the values from before the round."""
    values = [torch.tensor(row.values, dtype=torch.float64) for row in rows]
    returns = [torch.tensor(row.returns, dtype=torch.float64) for row in rows]
    masks = [torch.tensor(row.weights) for row in rows]
    return {"train/critic-explained_variance": explained_variance(values, returns, masks)}
