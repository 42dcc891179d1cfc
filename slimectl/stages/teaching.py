"""Attaches log-probabilities of another model (reference, teacher) to samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from slimectl.ports import LogProbs
from slimectl.streams import batched
from slimectl.types import Row, Sample

BATCH = 64
"""Samples per forward pass of the model."""


def with_log_probs(
    samples: Iterable[Sample],
    model: LogProbs,
    field: Literal["ref_log_probs", "teacher_log_probs"],
    *,
    again: bool = False,
) -> Iterator[Sample]:
    """Yield every sample with the log-probabilities of its response under `model`, stored in `field`.

    Existing values are kept, unless `again` recomputes them.
    """
    for batch in batched(samples, BATCH):
        lacking = [sample for sample in batch if again or getattr(sample, field) is None]
        rows = [Row(s.tokens, s.response_length, [0.0] * s.response_length, group=s.group_index) for s in lacking]
        for sample, log_probs in zip(lacking, model.log_probs(rows) if rows else [], strict=True):
            setattr(sample, field, log_probs)
        yield from batch
