r"""Reads the bounds of sums, products, integrals and limits, and gives them values for comparison."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from slimectl.rewards.math.arithmetic import NoValueError, add, context, multiply
from slimectl.rewards.math.expressions import Tree
from slimectl.rewards.math.spelling import spelling

MAX_TERMS = 100
"""Maximum number of terms of a computed sum or product. A longer one is compared by its body."""

_BIG = r"\\(?:sum|prod|i{0,2}int|oint|lim|Sigma|Pi)(?![A-Za-z])"
_HAS_BIG = re.compile(_BIG)
_BOUND = re.compile(
    rf"({_BIG})(\s*\^\s*(?:\w|\\infty|\{{[^{{}}]*\}}))?\s*_\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}(?=(\s*\^)?)"
)
_START = re.compile(r"\s*([A-Za-z])\s*=(?!.*[=<>])(.+)", re.DOTALL)
_FROM = re.compile(r"\s*([A-Za-z])\s*\\ge\s*(-?\d+)\s*")
_DIFFERENTIAL = re.compile(r"\\(?:mathrm|text|operatorname)\s*\{?\s*d\s*\}?(?=\s*[A-Za-z\\])")
_WHOLE = tuple(Fraction(at) for at in (3, 6, 8, 13, -2))
_REAL = (Fraction(3, 7), Fraction(19, 11), Fraction(47, 5), Fraction(-5, 3), Fraction(-12, 7))


def shielded(text: str) -> str:
    r"""Hide the signs = and < of bounds, which form no equation: \sum_{k=0}^n is \sum_{k\from 0}^n.

    Any other bound (\sum_{i<j}, \lim_{x\to 0}) becomes \where{number letters}, by its spelling.
    """
    if "\\" not in text or not _HAS_BIG.search(text):
        return text
    if "int" in text:
        text = _DIFFERENTIAL.sub(" d", text)
    return _BOUND.sub(_hidden, text)


def _hidden(match: re.Match[str]) -> str:
    operator, above, condition, is_followed = match.groups()
    name = {"Sigma": "sum", "Pi": "prod"}.get(operator[1:], operator[1:])
    above = above or ""
    if name != operator[1:] and "=" not in condition:
        return match[0]
    if start := _START.fullmatch(condition):
        return rf"\{name}{above}_{{{start[1]}\from {start[2]}}}"
    if (start := _FROM.fullmatch(condition)) and not above and is_followed is None:
        return rf"\{name}_{{{start[1]}\from {start[2]}}}^{{\infty}}"
    if name != "lim" and not re.search(r"[<>|=]|\\(?:le|ge|ne|in|mid)(?![A-Za-z])", condition):
        return match[0]
    letters = sorted(set(re.findall(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", condition)))
    if name == "lim":
        letters = re.findall(r"^\s*([A-Za-z])", condition)
    return rf"\{name}{above}_{{\where{{{zlib.crc32(spelling(condition).encode())} {' '.join(letters)}}}}}"


def is_finite(tree: Tree) -> bool:
    """Whether the sum or product of a tree ("big", operator, names, key, low, high, body) is computed."""
    _, operator, names, key, low, high, _ = tree
    if operator not in ("sum", "prod") or key or len(names) != 1:
        return False
    first, last = _whole(low), _whole(high)
    return first is not None and last is not None and last - first < MAX_TERMS


def _whole(end: Tree | None) -> int | None:
    sign = -1 if end and end[0] == "neg" else 1
    number = end[1] if end and sign < 0 else end
    return sign * int(number[1]) if number and number[0] == "num" and number[1].denominator == 1 else None


def big_value(tree: Tree, value: Callable[[Tree], Any], body_at: Callable[[dict[str, Fraction]], Any]) -> Any:
    """The value of a finite sum or product, or a stand-in for any other operator.

    The stand-in combines the body's values at a few places, with weights that operator and bounds choose. It is linear
    for sums, integrals and limits, so it obeys their common rules: terms may be split and constants moved out. Two
    different bodies agree only by chance.
    """
    _, operator, names, key, low, high, _ = tree
    if is_finite(tree):
        first, last = (int(value(end)) for end in (low, high))
        total: Any = Fraction(operator == "prod")
        for at in range(first, last + 1):
            total = (multiply if operator == "prod" else add)(total, body_at({names: Fraction(at)}))
        return total
    label = f"{operator} {key} {_spelled(low, value)} {_spelled(high, value)} {names if key or low is None else ''}"
    places = _WHOLE if operator in ("sum", "prod") else _REAL
    is_linear = operator != "prod" and names != ""
    total, count = Fraction(not is_linear), 0
    for at in range(len(places)):
        bound = {name: places[(at + shift) % len(places)] for shift, name in enumerate(names.split())}
        weight = Fraction(zlib.crc32(f"{label} {at}".encode()) % 9973 + 1, 9973)
        try:
            part = body_at(bound)
        except NoValueError:
            continue
        total = add(total, multiply(weight, part)) if is_linear else multiply(total, add(weight, part))
        count += 1
    if not count:
        raise NoValueError
    return total


def _spelled(end: Tree | None, value: Callable[[Tree], Any]) -> str:
    infinity = ("const", "infinity")
    if end is None or end in (infinity, ("neg", infinity)):
        return str(end)
    number = value(end)
    return str(number) if isinstance(number, Fraction) else str(context().nstr(number, 40))
