"""Penalties on response length."""

from __future__ import annotations

from dataclasses import dataclass

from slimectl.errors import SettingsError
from slimectl.rewards.verdict import Verdict, Verifier, nothing
from slimectl.types import Sample


@dataclass(frozen=True)
class LengthPenalty(Verifier):
    """0.0 up to `free` response tokens, rising linearly to 1.0 at `limit` and beyond; use a negative weight.

    >>> LengthPenalty(limit=1000, free=200)(Sample(response_length=600))
    0.5

    With `free` 0 the penalty is proportional to the length, as in Aggarwal and Welleck 2025, arXiv:2503.04697, eq. 1.
    """

    limit: int
    free: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.free < self.limit:
            raise SettingsError(
                f"score.rm_options.free: {self.free} is not from 0 to below limit: {self.limit}; change one"
            )

    def explain(self, sample: Sample) -> Verdict:
        length = sample.response_length
        value = min(1.0, max(0.0, (length - self.free) / (self.limit - self.free)))
        return nothing("response length", f"{length} tokens: free up to {self.free}, limit {self.limit}", value)

    def extract(self, sample: Sample) -> str | None:
        return None


@dataclass(frozen=True)
class Overlong(Verifier):
    """DAPO's soft overlong punishment: 0.0 up to `limit - buffer` response tokens, -1.0 at `limit` and beyond.

    >>> [Overlong(limit=20, buffer=4)(Sample(response_length=n)) for n in (16, 17, 20, 99)]
    [0.0, -0.25, -1.0, -1.0]

    Yu et al. 2025, arXiv:2503.14476, eq. 13: (limit - buffer - length) / buffer inside the buffer.
    """

    limit: int
    buffer: int

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.limit:
            raise SettingsError(
                f"score.rm_options.buffer: {self.buffer} is not from 1 to limit: {self.limit}; change one"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        return -1.0, 0.0

    def explain(self, sample: Sample) -> Verdict:
        length, start = sample.response_length, self.limit - self.buffer
        value = -1.0 if length > self.limit else min(0.0, (start - length) / self.buffer)
        return nothing("response length", f"{length} tokens: the buffer begins at {start}, limit {self.limit}", value)

    def extract(self, sample: Sample) -> str | None:
        return None
