"""Sets of real numbers as unions of intervals, made from intervals and inequalities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cmp_to_key
from typing import Any, NamedTuple

from slimectl.rewards.math.arithmetic import add, divide, is_less, multiply, same_value
from slimectl.rewards.math.expressions import Tree
from slimectl.rewards.math.values import constant_value, substituted, symbols


class Interval(NamedTuple):
    """All numbers between two ends, with or without each end. Ends are values or infinite floats."""

    low: Any
    has_low: bool
    high: Any
    has_high: bool


Region = tuple[Interval, ...]
"""Disjoint intervals in order, as few as possible."""

EMPTY: Region = ()
REALS: Region = (Interval(-math.inf, False, math.inf, False),)


def same_region(first: Region, second: Region) -> bool:
    return len(first) == len(second) and all(
        a.has_low == b.has_low and a.has_high == b.has_high and _same(a.low, b.low) and _same(a.high, b.high)
        for a, b in zip(first, second, strict=True)
    )


def interval(brackets: str, low: Tree | None, high: Tree | None) -> Region | None:
    """Return the interval between two constants, "[)" for [low, high). None if it is invalid or empty."""
    ends = end_value(low), end_value(high)
    if None in ends or not is_less(*ends):
        closed_point = None not in ends and brackets == "[]" and _same(*ends)
        return (Interval(ends[0], True, ends[1], True),) if closed_point else None
    has = [bracket in "[]" and not isinstance(end, float) for bracket, end in zip(brackets, ends, strict=True)]
    if any(bracket in "[]" and isinstance(end, float) for bracket, end in zip(brackets, ends, strict=True)):
        return None  # infinity belongs to no interval
    return (Interval(ends[0], has[0], ends[1], has[1]),)


def end_value(tree: Tree | None) -> Any:
    """Return the value of an end, with infinities as floats, or None if it is not constant."""
    if tree is None:
        return None
    infinity = ("const", "infinity")
    if tree in (infinity, ("neg", infinity)):
        return math.inf if tree == infinity else -math.inf
    return constant_value(tree)


def union(regions: Sequence[Region]) -> Region:
    def order(a: Interval, b: Interval) -> int:
        if _same(a.low, b.low):
            return b.has_low - a.has_low
        return -1 if is_less(a.low, b.low) else 1

    merged: list[Interval] = []
    for part in sorted((part for region in regions for part in region), key=cmp_to_key(order)):
        last = merged[-1] if merged else None
        touches = last and (
            is_less(part.low, last.high) or (_same(part.low, last.high) and (part.has_low or last.has_high))
        )
        if not last or not touches:
            merged.append(part)
        elif _same(last.high, part.high):
            merged[-1] = last._replace(has_high=last.has_high or part.has_high)
        elif is_less(last.high, part.high):
            merged[-1] = last._replace(high=part.high, has_high=part.has_high)
    return tuple(merged)


def complement(region: Region) -> Region:
    parts, low, has_low = [], -math.inf, False
    for part in region:
        if is_less(low, part.low) or (_same(low, part.low) and has_low and not part.has_low):
            parts.append(Interval(low, has_low, part.low, not part.has_low and not isinstance(part.low, float)))
        low, has_low = part.high, not part.has_high
    if low != math.inf:
        parts.append(Interval(low, has_low, math.inf, False))
    return tuple(parts)


def intersection(regions: Sequence[Region]) -> Region:
    return complement(union([complement(region) for region in regions]))


def solution(sides: Sequence[Tree], operators: Sequence[str]) -> tuple[str, Region] | None:
    r"""Return the variable and solutions of a chain of linear inequalities in one variable, or None.

    Operators are <, >, \le, \ge and \ne.
    """
    infinity = ("const", "infinity")
    finite = [side for side in sides if side not in (infinity, ("neg", infinity))]
    names = frozenset().union(*map(symbols, finite))
    if len(names) != 1:
        return None
    regions = []
    for lower, operator, upper in zip(sides, operators, sides[1:], strict=False):
        if (
            operator == "<"
            and (lower == ("neg", infinity) or upper == infinity)
            and (lower in finite or upper in finite)
        ):
            continue
        region = _half_line(("sub", lower, upper), operator)
        if region is None:
            return None
        regions.append(region)
    return next(iter(names)), intersection(regions) if regions else REALS


def _half_line(difference: Tree, operator: str) -> Region | None:
    """Solutions of `difference OPERATOR 0`, linear in its variable."""
    values = [substituted(difference, Fraction(at)) for at in (0, 1, 2, 7, -5)]
    if any(value is None for value in values):
        return None
    slope = add(values[1], values[0], -1)
    lines = [add(values[0], multiply(slope, Fraction(at))) for at in (2, 7, -5)]
    if slope == 0 or not all(map(same_value, lines, values[2:])):
        return None
    root = divide(-values[0], slope)
    if operator == r"\ne":
        return (Interval(-math.inf, False, root, False), Interval(root, False, math.inf, False))
    has, upward = operator in (r"\le", r"\ge"), (operator in (">", r"\ge")) == (not is_less(slope, Fraction(0)))
    return (Interval(root, has, math.inf, False),) if upward else (Interval(-math.inf, False, root, has),)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, float) or isinstance(second, float):
        return isinstance(first, float) and isinstance(second, float) and first == second
    return same_value(first, second)
