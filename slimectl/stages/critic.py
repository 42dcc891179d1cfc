"""The critic's half of a step: it learns returns, and says how much of them it knew."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slimectl.algorithms.values import ValueLoss, explained_variance
from slimectl.ports import Critic
from slimectl.settings.algorithm import Ppo
from slimectl.stages.finite import FiniteCheck
from slimectl.types import Metrics, Row


def set_values(rows: Sequence[Row], critic: Critic) -> None:
    """Write `Row.values`: what the critic expects before the round is learnt from."""
    if rows:
        for row, values in zip(rows, critic.values(rows), strict=True):
            row.values = values


def critic_step(rows: Sequence[Row], critic: Critic, algorithm: Ppo, finite: FiniteCheck) -> Metrics:
    """One optimizer step over rows that are weighed and have values and returns; metrics train/critic-…

    Raises DivergedError, before the update, if loss or gradient are not finite.
    """
    summed = finite.update(critic, ValueLoss(algorithm.value_clip), of="the critic's", outputs=critic.values)
    metrics = {f"train/critic-{name}": value for name, value in summed.items()}
    return metrics | explained(rows)


def explained(rows: Sequence[Row]) -> Metrics:
    """How much of the returns the values knew that the round began with."""
    values = [torch.tensor(row.values, dtype=torch.float64) for row in rows]
    returns = [torch.tensor(row.returns, dtype=torch.float64) for row in rows]
    masks = [torch.tensor(row.weights) for row in rows]
    return {"train/critic-explained_variance": explained_variance(values, returns, masks)}
