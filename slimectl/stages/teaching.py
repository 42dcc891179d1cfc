"""Samples that lack what another model thinks of them, completed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from slimectl.ports import LogProbs
from slimectl.streams import batched
from slimectl.types import Row, Sample

BATCH = 64
"""Samples whose log-probabilities are computed together."""


def with_log_probs(
    samples: Iterable[Sample],
    model: LogProbs,
    field: Literal["ref_log_probs", "teacher_log_probs"],
    *,
    again: bool = False,
) -> Iterator[Sample]:
    """Every sample with the log-probabilities that `model` gives its response under `field`.

    Those that a sample has stay, unless they are to be computed `again`.
    """
    for batch in batched(samples, BATCH):
        lacking = [sample for sample in batch if again or getattr(sample, field) is None]
        rows = [Row(s.tokens, s.response_length, [0.0] * s.response_length, group=s.group_index) for s in lacking]
        for sample, log_probs in zip(lacking, model.log_probs(rows) if rows else [], strict=True):
            setattr(sample, field, log_probs)
        yield from batch
