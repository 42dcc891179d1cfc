"""Weighted mixing of prompt sources, and shuffled orders."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count
from typing import TypeVar

from slimectl.errors import SettingsError

Row = TypeVar("Row")
Source = Callable[[int], Iterator[Row]]
"""Opens a source at a row number; the iterator never ends."""


def mixed(
    sources: Sequence[Source[Row]], weights: Sequence[float], *, seed: int, start: int = 0, total: int | None = None
) -> Iterator[Row]:
    """Rows `start` to `total` (None: without end) of the mix: each is the next row of a source drawn by its weight.

    The order of the sources depends on the seed alone, so any position is reached without reading earlier rows: only
    the draws are repeated, about a million per second.
    """
    rng = random.Random(f"{seed}:mix")
    bounds = list(accumulate(weights))
    numbers = range(len(weights))

    def draw() -> int:
        return rng.choices(numbers, cum_weights=bounds)[0]

    drawn = Counter(draw() for _ in range(start))
    reading = [source(drawn[i]) for i, source in enumerate(sources)]
    for _ in count() if total is None else range(start, total):
        yield next(reading[draw()])


def check_weights(weights: Sequence[float], sources: Sequence[str]) -> None:
    """Raise SettingsError unless there is one weight per source."""
    if len(weights) != len(sources):
        raise SettingsError(
            f"rollout.data_weights: {len(weights)} weights for {len(sources)} sources of rollout.data; give as many"
        )


def shuffled_order(size: int, seed: int | str, epoch: int) -> array[int]:
    """The numbers below `size` in the order of one epoch. Must not change: runs resume across versions."""
    order = array("Q", range(size))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order
