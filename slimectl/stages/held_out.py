"""Evaluates the loss on held-out demonstrations and preferences, without sampling."""

from __future__ import annotations

from collections.abc import Iterable

from slimectl.algorithms.estimators import TrainingBatch
from slimectl.settings import Settings
from slimectl.settings.needs import AlgorithmSection, Need
from slimectl.stages.advantages import Models, attach_scores
from slimectl.stages.preferences import set_preference_gradients
from slimectl.stages.recorded_rounds import sample_batches
from slimectl.stages.training_batch import BUILDERS
from slimectl.types import Metrics, Sample

BATCH = 256
"""Number of demonstrations or pairs in memory at the same time."""


def held_out_metrics(name: str, samples: Iterable[Sample], models: Models, settings: Settings) -> Metrics:
    """Return the loss on held-out demonstrations. For preferences, add accuracy, margin and rewards of the pairs.

    The loss of demonstrations is the mean of -log p over all tokens that training would use.
    """
    measure = _pair_sums if Need.PAIRS in settings.algorithm.needs else _token_sums
    count, sums = 0.0, dict[str, float]()
    for members in sample_batches(samples, settings.algorithm, BATCH):
        attach_scores(members, models, settings)
        batch, _ = BUILDERS[settings.algorithm.trains_on](members, settings.algorithm, settings.score)
        if batch.rows:
            size, values = measure(batch, models, settings.algorithm)
            count += size
            sums = {key: sums.get(key, 0.0) + value for key, value in values.items()}
    return {f"eval/{name}/{key}": value / count for key, value in sums.items()}


def _token_sums(batch: TrainingBatch, models: Models, algorithm: AlgorithmSection) -> tuple[float, Metrics]:
    """Return the number of trained tokens, and the sum of their losses."""
    count = loss = 0.0
    for row, log_probs in zip(batch.rows, models.outputs(algorithm)(batch.rows), strict=True):
        count += sum(row.loss_weights)
        loss -= sum(value * weight for value, weight in zip(log_probs, row.loss_weights, strict=True))
    return count, {"loss": loss}


def _pair_sums(batch: TrainingBatch, models: Models, algorithm: AlgorithmSection) -> tuple[float, Metrics]:
    """Return the number of pairs, and the sums of their metrics."""
    pairs = len(batch.rows) / 2
    means = set_preference_gradients(batch.rows, algorithm, models.outputs(algorithm))
    return pairs, {name.removeprefix("train/"): mean * pairs for name, mean in means.items()}
