"""Compares whole numbers that are too large to write out, by their remainders."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from slimectl.rewards.math.arithmetic import NoValueError
from slimectl.rewards.math.expressions import Tree

PRIME = 2**256 + 230191
"""A safe prime. (PRIME - 1) / 2 is prime too, so only the powers of 1 and -1 repeat early."""

MAX_FACTORIAL = 5000


def residue(tree: Tree, exact: Callable[[Tree], Any]) -> int:
    """The remainder by PRIME of an expression of whole numbers. Exponents and factorials are `exact` values.

    Two different values have the same remainder with a probability of 2^-256. Raises NoValueError for anything else.
    """
    kind = tree[0]
    if kind == "num":
        return int(tree[1].numerator * _inverse(tree[1].denominator) % PRIME)
    if kind == "pow":
        base, exponent = residue(tree[1], exact), _whole(exact(tree[2]))
        return pow(_inverse(base) if exponent < 0 else base, abs(exponent), PRIME)
    if kind == "factorial":
        product = 1
        for at in range(2, min(_whole(exact(tree[1])), MAX_FACTORIAL + 1) + 1):
            product = product * at % PRIME
        if _whole(exact(tree[1])) not in range(MAX_FACTORIAL + 1):
            raise NoValueError
        return product
    if kind not in ("neg", "add", "sub", "mul", "div"):
        raise NoValueError
    first, *others = (residue(part, exact) for part in tree[1:])
    if kind == "neg":
        return -first % PRIME
    (second,) = others
    if kind in ("add", "sub"):
        return (first + second if kind == "add" else first - second) % PRIME
    return first * (second if kind == "mul" else _inverse(second)) % PRIME


def _inverse(value: int) -> int:
    if value % PRIME == 0:
        raise NoValueError
    return pow(value, -1, PRIME)


def _whole(value: Any) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1:
        raise NoValueError
    return int(value)
