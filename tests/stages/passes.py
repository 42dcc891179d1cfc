"""The first three passes over a round, with a policy that finds every token as likely as given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimectl.algorithms.estimators import TrainingBatch
from slimectl.settings import Settings
from slimectl.settings.score import ScoreSettings
from slimectl.stages.advantages import Models, attach_model_outputs, set_advantages
from slimectl.stages.hooks import NO_HOOKS
from slimectl.stages.optimizer_step import loss_weights
from slimectl.stages.training_batch import build_policy_batch
from slimectl.types import Metrics, Sample, TrainingSample


@dataclass
class Even:
    """A policy for which every token has the same log-probability."""

    log_prob: float

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        return [[self.log_prob] * row.response_length for row in rows]


def training_batch(
    samples: Sequence[Sample], algorithm: Any, *, old: float = -1.0, critic: Any = None
) -> tuple[TrainingBatch, Metrics]:
    """The rows of a round with old log-probabilities and advantages, and the metrics of these passes."""
    batch, metrics = build_policy_batch(samples, algorithm, ScoreSettings())
    policy: Any = Even(old)
    attach_model_outputs(batch.rows, Models(policy, critic), algorithm, NO_HOOKS, several_steps=True)
    settings = Settings().model_copy(update={"algorithm": algorithm})
    return batch, metrics | set_advantages(batch, settings, NO_HOOKS, 1)


def set_loss_weights(rows: Sequence[TrainingSample], executions: Sequence[int], algorithm: Any) -> None:
    """Give rows the loss weights of one step over all of them."""
    for row, weights in zip(rows, loss_weights([row.loss_weights for row in rows], executions, algorithm), strict=True):
        row.loss_weights = weights
