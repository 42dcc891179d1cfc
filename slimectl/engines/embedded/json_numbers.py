"""Grammars for JSON Schema numbers between bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimectl.engines.embedded.grammar import EMPTY, Choice, Node, Repeat, literal
from slimectl.engines.embedded.json_terminals import DIGIT, optional, ranges, series
from slimectl.errors import SettingsError

MOST_DIGITS = 20
LARGEST = 10**MOST_DIGITS - 1
NINE = ranges((0x31, 0x39))
SOME_FRACTION = series(".", Repeat(literal("0"), 0, 9), NINE, Repeat(DIGIT, 0, 10))
"""Decimals that are not all 0."""
ANY_FRACTION = optional(series(".", Repeat(DIGIT, 1, MOST_DIGITS)))


def bounded_number(bounds: Mapping[str, Any], at: str, *, whole: bool) -> Node:
    """Return the grammar of numbers within minimum, maximum, exclusiveMinimum and exclusiveMaximum.

    The numbers have no exponents. Raises SettingsError for bounds that are not whole numbers or that no number fits.
    """
    for name, value in bounds.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise SettingsError(f"json_schema: {at}: {name} {str(value)[:40]} is not a whole number. Leave it out.")
    low, open_low = _bound(bounds, "minimum", "exclusiveMinimum", -LARGEST, max)
    high, open_high = _bound(bounds, "maximum", "exclusiveMaximum", LARGEST, min)
    if whole:
        low, high = low + open_low, high - open_high
        options = [*_negative(integers(max(1, -high), -low)), *_option(integers(max(0, low), high))]
    else:
        positive = numbers(max(0, low), high, open_low=open_low and low >= 0, open_high=open_high)
        negative = numbers(max(0, -high), -low, open_low=(open_high and high <= 0) or high > 0, open_high=open_low)
        options = [*_negative(negative), *_option(positive)]
    if not options:
        raise SettingsError(f"json_schema: {at}: no number is within {', '.join(sorted(bounds))}")
    return Choice(tuple(options))


def _bound(bounds: Mapping[str, Any], closed: str, opened: str, default: int, tighter: Any) -> tuple[int, bool]:
    """Return the tighter of two bounds, and whether it is exclusive."""
    values = [(int(bounds[name]), name == opened) for name in (closed, opened) if name in bounds]
    if not values:
        return default, False
    value = tighter(value for value, _ in values)
    value_is_open = (value, True) in values
    return max(-LARGEST, min(LARGEST, value)), value_is_open


def _option(node: Node | None) -> list[Node]:
    return [] if node is None else [node]


def _negative(node: Node | None) -> list[Node]:
    return [] if node is None else [series("-", node)]


def integers(low: int, high: int) -> Node | None:
    """Return the grammar of the integers from `low` >= 0 to `high`, or None if there are none."""
    if low > high:
        return None
    options = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = low if length == len(str(low)) else 10 ** (length - 1)
        last = high if length == len(str(high)) else 10**length - 1
        options.append(_digits(str(first), str(last)))
    return Choice(tuple(options))


def _digits(low: str, high: str) -> Node:
    """Return the grammar of the digit strings between two of the same length."""
    if not low:
        return EMPTY
    if set(low) == {"0"} and set(high) == {"9"}:
        return Repeat(DIGIT, len(low), len(low))
    rest = len(low) - 1
    if low[0] == high[0]:
        return series(low[0], _digits(low[1:], high[1:]))
    options = [series(low[0], _digits(low[1:], "9" * rest)), series(high[0], _digits("0" * rest, high[1:]))]
    if ord(high[0]) - ord(low[0]) > 1:
        options.append(series(ranges((ord(low[0]) + 1, ord(high[0]) - 1)), _digits("0" * rest, "9" * rest)))
    return Choice(tuple(options))


def numbers(low: int, high: int, *, open_low: bool, open_high: bool) -> Node | None:
    """Return the grammar of the numbers from `low` >= 0 to `high`, or None if there are none."""
    if low > high or (low == high and (open_low or open_high)):
        return None
    options: list[Node] = []
    if low < high:
        options.append(series(str(low), SOME_FRACTION if open_low else ANY_FRACTION))
        if (between := integers(low + 1, high - 1)) is not None:
            options.append(series(between, ANY_FRACTION))
    if not open_high:
        options.append(series(str(high), optional(series(".", Repeat(literal("0"), 1, MOST_DIGITS)))))
    return Choice(tuple(options))
