"""Rows whose engine chose experts at random, which no router of a trainer would choose by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimectl.data.routed_experts import decoded, encoded
from slimectl.types import TrainingSample


def routed(
    rows: Sequence[TrainingSample],
    *,
    layers: int,
    experts: int,
    choices: int = 2,
    seed: int = 5,
    by_prefix: bool = False,
) -> list[TrainingSample]:
    """The rows with `choices` different experts of every input in every layer.

    With `by_prefix` rows have the experts of the tokens that they begin with in common, as of an engine that keeps
    them; but of every third row all tokens from the third on have others.
    """
    draw = np.random.default_rng(seed)
    scores: dict[tuple[int, ...], np.ndarray] = {}
    for i, row in enumerate(rows):
        scores_ILE = draw.random((row.input_length, layers, experts))
        if by_prefix:
            for end in range(1, (2 if i % 3 == 2 else row.input_length) + 1):
                scores_ILE[end - 1] = scores.setdefault(tuple(row.tokens[:end]), scores_ILE[end - 1])
        row.routed_experts = encoded(scores_ILE.argsort(axis=-1)[..., :choices])
    return list(rows)


def computed_once(rows: Sequence[TrainingSample]) -> int:
    """Number of different prefixes of what the model reads, and of the experts that it is to read it with."""
    prefixes = set()
    for row in rows:
        assert row.routed_experts is not None
        experts_ILk = decoded(row.routed_experts)
        prefixes |= {(tuple(row.tokens[:end]), experts_ILk[:end].tobytes()) for end in range(1, row.input_length + 1)}
    return len(prefixes)
