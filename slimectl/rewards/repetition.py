"""Penalty on repeated n-grams."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from slimectl.errors import SettingsError
from slimectl.rewards.verdict import Verdict, Verifier, nothing
from slimectl.types import Sample


@dataclass(frozen=True)
class Repetition(Verifier):
    """The share of n-grams that occurred before, 0.0 (none) to below 1.0; use a negative weight.

    >>> Repetition(n=2)(Sample(response="up down up down up"))  # four pairs, two of them again
    0.5

    One minus the distinct-n of Li et al. 2016, arXiv:1510.03055; as a penalty on reasoning: Yeo et al. 2025,
    arXiv:2502.03373. `of` words: runs of letters and digits, in lower case, any other character a separate word;
    `of` tokens: the policy's tokens, which suits scripts without spaces. Fewer than n units count as no repetition.
    """

    n: int = 3
    of: Literal["words", "tokens"] = "words"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise SettingsError(f"score.rm_options.n: {self.n} is no length of an n-gram; give 1 or more")

    def explain(self, sample: Sample) -> Verdict:
        if self.of == "tokens":
            pieces: list[int] | list[str] = sample.tokens[len(sample.tokens) - sample.response_length :]
        else:
            pieces = re.findall(r"\w+|[^\w\s]", sample.response.lower())
        total = max(0, len(pieces) - self.n + 1)
        distinct = len(set(zip(*(pieces[at:] for at in range(self.n)), strict=False)))
        reason = f"{distinct} of {total} {self.n}-grams of {self.of} are distinct"
        return nothing("whole response", reason, 1 - distinct / total if total else 0.0)

    def extract(self, sample: Sample) -> str | None:
        return None
