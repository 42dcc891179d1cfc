"""Colours of tokens by their training values, for the page of `slimectl view` and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

Values = Mapping[str, Any]
"""Values of one token by the name of their list. None if a list has no value for it."""


@dataclass(frozen=True)
class TokenColour:
    """A value of each token, and the strength from -1 to 1 with which it colours the token."""

    name: str
    title: str
    columns: tuple[str, ...]
    """Lists that a sample must have."""
    value: Callable[[Values], float | None]
    full: float
    """Value with strength 1."""
    tone: str
    """"cold" (only strong or weak), "both" (low and high), "taught" or "author"."""
    mark: str | None = None
    """List whose true values are also marked."""
    is_ratio: bool = False
    """Whether strengths are proportional to the logarithm of the value, so that 1 has strength 0."""

    def strength(self, value: float) -> float:
        if not self.is_ratio:
            return max(-1.0, min(1.0, value / self.full))
        return max(-1.0, min(1.0, math.log(value) / math.log(self.full))) if value > 0 else -1.0

    @property
    def ends(self) -> tuple[float, float]:
        """Values with the lowest and the highest strength."""
        if self.tone == "both":
            return (1 / self.full if self.is_ratio else -self.full), self.full
        return 0.0, self.full


def _difference(left: str, right: str) -> Callable[[Values], float | None]:
    def difference(values: Values) -> float | None:
        a, b = _number(values[left]), _number(values[right])
        return None if a is None or b is None else a - b

    return difference


def _of(name: str) -> Callable[[Values], float | None]:
    return lambda values: _number(values[name])


def _number(value: Any) -> float | None:
    """Return a finite number unchanged, and None for anything else, because a samples file may contain anything."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


VERSION = "weight_version"
LOGPROB, OLD, REFERENCE, TEACHER = "rollout_log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs"
COLOURS = (
    TokenColour("logprob", "log-prob", (LOGPROB,), _of(LOGPROB), -5, "cold"),
    TokenColour("trainer_minus_engine", "trainer − engine", (OLD, LOGPROB), _difference(OLD, LOGPROB), 0.1, "both"),
    TokenColour("ratio", "ratio", ("ratios",), _of("ratios"), math.exp(0.3), "both", mark="clipped", is_ratio=True),
    TokenColour("advantage", "advantage", ("advantages",), _of("advantages"), 2, "both"),
    TokenColour("reference", "engine − reference", (REFERENCE, LOGPROB), _difference(LOGPROB, REFERENCE), 3, "both"),
    TokenColour("teacher", "teacher − engine", (TEACHER, LOGPROB), _difference(TEACHER, LOGPROB), 3, "both"),
    TokenColour("mask", "loss mask", ("loss_mask",), _of("loss_mask"), 1, "taught"),
    TokenColour(VERSION, "weight version", (VERSION,), _of(VERSION), 1, "both"),
    TokenColour("author", "author", (), lambda values: None, 1, "author"),
)
"""Colours in the order of the page's keys 1 to 9."""


def token_colours(columns: Mapping[str, Sequence[Any]], authors: Sequence[str]) -> list[dict[str, Any]]:
    """Return the colours for which a sample has all lists, with the value and strength of every token.

    `authors` has the author of each token: "prompt", "policy" or "environment".
    """
    return [
        {
            "name": colour.name,
            "title": colour.title,
            "tone": colour.tone,
            "values": values,
            "strengths": _strengths(colour, values),
            "marks": list(columns.get(colour.mark or "", ())),
            "ends": _version_ends(values) if colour.name == VERSION else colour.ends,
        }
        for colour in COLOURS
        if all(name in columns for name in colour.columns) and (colour.name != VERSION or _differ(columns[VERSION]))
        for values in [_values(colour, columns, authors)]
    ]


def _version_ends(values: Sequence[float | None]) -> tuple[float, float]:
    """Return the oldest and the newest weight version of a sample."""
    numbers = [value for value in values if value is not None]
    return min(numbers, default=0.0), max(numbers, default=0.0)


def _differ(column: Sequence[Any]) -> bool:
    """Return whether a list has several values. A single version needs no colours."""
    return len({value for value in column if value is not None}) > 1


def _strengths(colour: TokenColour, values: Sequence[float | None]) -> list[float | None]:
    """Return the strength of each token. For weight versions, it is the distance from the newest of the sample."""
    numbers = [value for value in values if value is not None]
    if colour.name == VERSION and numbers:
        newest, spread = max(numbers), max(1.0, max(numbers) - min(numbers))
        return [None if value is None else round((value - newest) / spread, 2) for value in values]
    return [None if value is None else round(colour.strength(value), 2) for value in values]


def _values(colour: TokenColour, columns: Mapping[str, Sequence[Any]], authors: Sequence[str]) -> list[float | None]:
    if colour.tone == "author":
        return [None if author == "prompt" else 0.5 for author in authors]
    lists = [columns[name] for name in colour.columns]
    return [colour.value(dict(zip(colour.columns, numbers, strict=True))) for numbers in zip_longest(*lists)]
