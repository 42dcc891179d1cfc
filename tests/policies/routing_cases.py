"""Rows whose engine chose experts at random, which no router of a trainer would choose by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimectl.data.routed_experts import encoded
from slimectl.types import TrainingSample


def routed(
    rows: Sequence[TrainingSample], *, layers: int, experts: int, choices: int = 2, seed: int = 5
) -> list[TrainingSample]:
    """The rows with `choices` different experts of every input in every layer."""
    draw = np.random.default_rng(seed)
    for row in rows:
        scores_ILE = draw.random((row.input_length, layers, experts))
        row.routed_experts = encoded(scores_ILE.argsort(axis=-1)[..., :choices])
    return list(rows)
