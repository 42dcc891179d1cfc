"""Penalties on response length and repetition, and a random reward."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from slimectl.errors import SettingsError
from slimectl.rewards.base import Grade, Verifier, no_answer
from slimectl.types import Sample


@dataclass(frozen=True)
class LengthPenalty(Verifier):
    """0.0 up to `free_tokens` of the response, rising linearly to 1.0 at `limit` and beyond. Use a negative weight.

    >>> LengthPenalty(limit=1000, free_tokens=200)(Sample(response_length=600))
    0.5

    With `free_tokens` 0 the penalty is proportional to the length: Aggarwal and Welleck 2025, arXiv:2503.04697, eq. 1.
    """

    ALIASES: ClassVar[dict[str, str]] = {"free": "free_tokens"}

    limit: int
    free_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.free_tokens < self.limit:
            raise SettingsError(
                f"score.rm_options.free_tokens: {self.free_tokens} must be at least 0 and below limit: {self.limit}"
            )

    def explain(self, sample: Sample) -> Grade:
        length = sample.response_length
        value = min(1.0, max(0.0, (length - self.free_tokens) / (self.limit - self.free_tokens)))
        return no_answer(
            "response length", f"{length} tokens: free up to {self.free_tokens}, limit {self.limit}", value
        )

    def extract(self, sample: Sample) -> str | None:
        return None


@dataclass(frozen=True)
class Overlong(Verifier):
    """DAPO's soft overlong punishment: 0.0 up to `limit - buffer` response tokens, -1.0 at `limit` and beyond.

    >>> [Overlong(limit=20, buffer=4)(Sample(response_length=n)) for n in (16, 17, 20, 99)]
    [0.0, -0.25, -1.0, -1.0]

    Yu et al. 2025, arXiv:2503.14476, eq. 13: (limit - buffer - length) / buffer inside the buffer.
    """

    bounds = (-1.0, 0.0)

    limit: int
    buffer: int

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.limit:
            raise SettingsError(f"score.rm_options.buffer: {self.buffer} must be from 1 to limit: {self.limit}")

    def explain(self, sample: Sample) -> Grade:
        length, start = sample.response_length, self.limit - self.buffer
        value = -1.0 if length > self.limit else min(0.0, (start - length) / self.buffer)
        return no_answer("response length", f"{length} tokens: the buffer begins at {start}, limit {self.limit}", value)

    def extract(self, sample: Sample) -> str | None:
        return None


@dataclass(frozen=True)
class Repetition(Verifier):
    """The share of n-grams that occurred before, 0.0 (none) to below 1.0. Use a negative weight.

    >>> Repetition(n=2)(Sample(response="up down up down up"))  # four pairs, two of them again
    0.5

    One minus the distinct-n of Li et al. 2016, arXiv:1510.03055. As a penalty on reasoning: Yeo et al. 2025,
    arXiv:2502.03373. With `unit` "words" the units are runs of letters and digits in lower case, and all other single
    characters. With "tokens" they are the policy's tokens, which suits scripts without spaces. Fewer than n units count
    as no repetition.
    """

    ALIASES: ClassVar[dict[str, str]] = {"of": "unit"}

    n: int = 3
    unit: Literal["words", "tokens"] = "words"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise SettingsError(f"score.rm_options.n: {self.n} must be 1 or more")

    def explain(self, sample: Sample) -> Grade:
        if self.unit == "tokens":
            pieces: list[int] | list[str] = sample.tokens[len(sample.tokens) - sample.response_length :]
        else:
            pieces = re.findall(r"\w+|[^\w\s]", sample.response.lower())
        total = max(0, len(pieces) - self.n + 1)
        distinct = len(set(zip(*(pieces[at:] for at in range(self.n)), strict=False)))
        reason = f"{distinct} of {total} {self.n}-grams of {self.unit} are distinct"
        return no_answer("whole response", reason, 1 - distinct / total if total else 0.0)

    def extract(self, sample: Sample) -> str | None:
        return None


@dataclass(frozen=True)
class Random(Verifier):
    """1.0 with probability `p`, else 0.0. Deterministic for a sample (index and response) and `seed`."""

    seed: int = 0
    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise SettingsError(f"score.rm_options.p: {self.p} must be from 0 to 1")

    def explain(self, sample: Sample) -> Grade:
        key = f"{self.seed}\0{sample.index}\0{sample.response}".encode("utf-8", "surrogatepass")
        drawn = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64
        right = drawn < self.p
        return no_answer(
            "seeded coin", f"drew {drawn:.3f}, {'below' if right else 'not below'} {self.p:g}", float(right)
        )

    def extract(self, sample: Sample) -> str | None:
        return None
