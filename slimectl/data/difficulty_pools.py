"""Difficulty pools: draws prompts by the pass rate of their last responses, and retires solved ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

EASY, NORMAL, HARD = "easy", "normal", "hard"
FALLBACKS = {EASY: (EASY, NORMAL, HARD), NORMAL: (NORMAL, HARD, EASY), HARD: (HARD, NORMAL, EASY)}
"""Pools in the order in which they are tried, by the pool that was drawn."""


@dataclass(frozen=True)
class PoolOptions:
    """Thresholds of pass rates, shares of the pools, and when a prompt is solved."""

    easy_threshold: float | None = None
    hard_threshold: float | None = None
    easy_fraction: float = 0.1
    hard_fraction: float = 0.1
    retire_after: int | None = None
    seed: int = 0


class DifficultyPools:
    """Draws row numbers: new rows, and rows of a pool that is chosen by its share.

    The draws depend only on the options and on what was recorded before each, so a resumed run repeats them. Each draw
    has a number. Numbers from `position` on were drawn before a resume but not completed: they give the same rows.

    >>> pools = DifficultyPools(PoolOptions(easy_threshold=1.0, easy_fraction=0.0))
    >>> [pools.draw(number, range(2)) for number in range(2)]
    [0, 1]
    >>> pools.record(0, [True, True]), pools.record(1, [True, False])
    (None, None)
    >>> pools.draw(2, range(2)), pools.counts()["easy"]
    (1, 1)
    """

    def __init__(self, options: PoolOptions, state: Mapping[str, Any] | None = None, *, position: int = 0) -> None:
        saved: Mapping[str, Any] = state or {}
        self._options = options
        self._seen: int = saved.get("seen", 0)
        """How many rows of the order have been drawn for the first time."""
        waiting = saved.get("waiting", {})
        # Dictionaries keep their order and find a row at once.
        self._waiting: dict[str, dict[int, None]] = {name: dict.fromkeys(waiting.get(name, ())) for name in FALLBACKS}
        self._rates: dict[int, float] = dict(saved.get("rates", ()))
        self._solved: dict[int, int] = dict(saved.get("solved", ()))
        """How many times in a row all responses to a row succeeded, if they did the last time."""
        self._drawn: dict[int, int] = dict(saved.get("drawn", ()))
        """The row of each draw that has not been recorded."""
        self._again: dict[int, int] = {number: row for number, row in self._drawn.items() if number >= position}

    def draw(self, number: int, order: Sequence[int]) -> int | None:
        """Return the row of this draw, or None if all are retired. `order` has the numbers of all rows."""
        row = self._again.pop(number) if number in self._again else self._next(number, order)
        if row is not None:
            self._drawn[number] = row
        return row

    def _next(self, number: int, order: Sequence[int]) -> int | None:
        share = random.Random(f"{self._options.seed}:{number}:pool").random()
        easy = 0.0 if self._options.easy_threshold is None else self._options.easy_fraction
        hard = 0.0 if self._options.hard_threshold is None else self._options.hard_fraction
        drawn = EASY if share < easy else HARD if share < easy + hard else NORMAL
        for name in FALLBACKS[drawn]:
            if name == NORMAL and self._seen < len(order):
                self._seen += 1
                return order[self._seen - 1]
            if self._waiting[name]:
                row = next(iter(self._waiting[name]))
                del self._waiting[name][row]
                return row
        # Every row is being answered, because a round has more prompts than there are rows.
        return next(iter(self._drawn.values()), None)

    def record(self, number: int, successes: Sequence[bool]) -> None:
        """Put the row of a draw into the pool of its pass rate. Without responses it stays in its pool."""
        row = self._drawn.pop(number, None)
        if row is None:
            return
        if successes:
            self._rates[row] = fmean(successes)
            self._solved[row] = self._solved.get(row, 0) + 1 if all(successes) else 0
        for rows in self._waiting.values():
            rows.pop(row, None)
        if not self._is_retired(row):
            self._waiting[self._pool(row)][row] = None

    def skip(self, number: int) -> None:
        """Do not draw the row of this draw again, because its prompt does not fit the model."""
        row = self._drawn.pop(number, None)
        self._drawn = {draw: another for draw, another in self._drawn.items() if another != row}

    def _is_retired(self, row: int) -> bool:
        limit = self._options.retire_after
        return limit is not None and self._solved.get(row, 0) >= limit

    def _pool(self, row: int) -> str:
        rate, options = self._rates.get(row), self._options
        if rate is None:
            return NORMAL
        if options.easy_threshold is not None and rate >= options.easy_threshold:
            return EASY
        return HARD if options.hard_threshold is not None and rate <= options.hard_threshold else NORMAL

    def counts(self) -> dict[str, int]:
        """Return the number of answered prompts by difficulty, and of retired ones."""
        counts = {EASY: 0, NORMAL: 0, HARD: 0, "retired": 0}
        for row in self._rates:
            counts["retired" if self._is_retired(row) else self._pool(row)] += 1
        return counts

    def to_json(self) -> dict[str, Any]:
        """Return the state, from which the following draws can be repeated."""
        return {
            "seen": self._seen,
            "waiting": {name: list(rows) for name, rows in self._waiting.items()},
            "rates": [[row, rate] for row, rate in self._rates.items()],
            "solved": [[row, times] for row, times in self._solved.items() if times],
            "drawn": [[number, row] for number, row in self._drawn.items()],
        }
