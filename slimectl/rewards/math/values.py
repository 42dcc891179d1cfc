"""Evaluates expressions, as exact fractions or with 320 digits, and compares them at many points."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from slimectl.rewards.math.arithmetic import (
    MAX_BITS,
    MAX_MAGNITUDE,
    MAX_POWER,
    WHOLE_NUMBER_FUNCTIONS,
    NoValueError,
    TooLargeError,
    add,
    checked,
    context,
    divide,
    exact_root,
    multiply,
    same_value,
    snapped,
    widened,
)
from slimectl.rewards.math.expressions import Tree
from slimectl.rewards.math.modular import residue
from slimectl.rewards.math.operators import big_value, is_finite

POINTS = 16
MAX_STEPS = 600
"""Maximum number of operations in sums and similar operators at one point."""

AGREEMENTS = 3
"""Points at which two expressions must be comparable, and then equal."""


def equal_values(first: Tree, second: Tree) -> bool:
    """Whether two expressions are equal wherever both are real, else as complex numbers. False if too costly.

    Fractions are compared exactly. Expressions with symbols are compared at 16 points, positive and negative.
    Different expressions would have to agree at every one of them.
    """
    if first == second:
        return True
    constant = not (symbols(first) or symbols(second))
    for is_complex in (False, True):
        agreements = 0
        for point in range(1 if constant else POINTS):
            values = value_at(first, point, is_complex), value_at(second, point, is_complex)
            if None in values:
                continue
            if not same_value(*values):
                return False
            agreements += 1
        if agreements >= (1 if constant else AGREEMENTS):
            return True
    return constant and values == (None, None) and _same_residue(first, second)


def _same_residue(first: Tree, second: Tree) -> bool:
    """Whether two whole numbers beyond the limits of arithmetic, such as 2^100000 and 4^50000, are equal."""
    try:
        return residue(first, constant_value) == residue(second, constant_value)
    except NoValueError:
        return False


def proportional(first: Tree, second: Tree, *, positive: bool = False) -> bool:
    """Whether two nonzero expressions are constant multiples of each other. `positive` allows only positive factors."""
    ratios: list[Any] = []
    for point in range(POINTS):
        values = value_at(first, point, False), value_at(second, point, False)
        if None in values:
            continue
        if (values[0] == 0) != (values[1] == 0):
            return False
        if values[0] == 0:
            continue
        ratios.append(divide(values[0], values[1]))
        if not same_value(ratios[0], ratios[-1]) or (positive and ratios[0] < 0):
            return False
    return len(ratios) >= AGREEMENTS


def constant_value(tree: Tree) -> Any:
    """Return the real value of an expression without symbols, or None."""
    return None if symbols(tree) else value_at(tree, 0, False)


@lru_cache(maxsize=8192)
def symbols(tree: Tree) -> frozenset[str]:
    """Free names of an expression. A sum or similar operator without a value counts as a name."""
    if tree[0] == "sym":
        return frozenset([tree[1]])
    if tree[0] == "big":
        free = frozenset().union(*map(symbols, filter(None, tree[4:]))) - set(tree[2].split())
        return free if is_finite(tree) else free | {tree[1]}
    return frozenset().union(*(symbols(part) for part in tree[1:] if isinstance(part, tuple)))


@lru_cache(maxsize=16384)
def value_at(tree: Tree, point: int, is_complex: bool) -> Any:
    """Return the value at one of the points (Fraction or mpmath number), or None if undefined or too costly."""
    try:
        return _Evaluator(point, is_complex).value(tree)
    except (ArithmeticError, ValueError, TypeError):
        return None


def substituted(tree: Tree, value: Fraction) -> Any:
    """Return the real value with every symbol replaced by one number, or None."""

    def replace(part: Any) -> Any:
        if not isinstance(part, tuple):
            return part
        return ("num", value) if part[0] == "sym" else tuple(map(replace, part))

    return value_at(replace(tree), 0, False)


def _symbol_value(name: str, point: int) -> Fraction:
    """An arbitrary fraction for a symbol: the points lie in (0, 1), (1, 4), (5, 30), below 0, and mixed."""
    seed = zlib.crc32(f"{name} {point}".encode())
    part = Fraction(seed % 9973 + 1, 9974)
    region = point % 4 if point < 12 else seed // 9973 % 3
    return (part, 1 + 3 * part, 5 + 25 * part, -6 * part)[region]


class _Evaluator:
    """Evaluates trees at one point. Raises NoValueError, TooLargeError, or what mpmath raises."""

    def __init__(self, point: int, is_complex: bool) -> None:
        self._point, self._is_complex = point, is_complex
        self._bound: dict[str, Fraction] = {}
        self._steps = 0

    def value(self, tree: Tree) -> Any:
        kind = tree[0]
        if kind == "num":
            return tree[1]
        if kind == "sym":
            return self._bound[tree[1]] if tree[1] in self._bound else _symbol_value(tree[1], self._point)
        if kind == "const":
            return self._constant(tree[1])
        if kind == "apply":
            return self._applied(tree[1], [self.value(part) for part in tree[2:]])
        if kind in _TRIGONOMETRY and tree[1][0] == "degree":
            ctx = context()
            return self._function(kind, checked(widened(self.value(tree[1][1])) * ctx.pi / 180))
        if kind == "big":
            return big_value(tree, self.value, lambda bound: self._value_at(tree[-1], bound))
        if self._bound:
            self._count()
        parts = [self.value(part) for part in tree[1:]]
        if kind in _ARITHMETIC:
            return _ARITHMETIC[kind](*parts)
        if kind == "pow":
            return self._power(*parts)
        if kind == "root":
            return self._power(parts[0], divide(Fraction(1), parts[1]))
        if kind == "log":
            return divide(self._logarithm(parts[0]), self._logarithm(parts[1]))
        return self._function(kind, *parts)

    def _count(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TooLargeError

    def _value_at(self, tree: Tree, bound: dict[str, Fraction]) -> Any:
        self._count()
        outer = self._bound
        self._bound = outer | bound
        try:
            return self.value(tree)
        finally:
            self._bound = outer

    def _constant(self, name: str) -> Any:
        ctx = context()
        if name == "i" and self._is_complex:
            return ctx.mpc(0, 1)
        if name in ("pi", "e"):
            return +getattr(ctx, name)
        raise NoValueError

    def _applied(self, name: str, arguments: list[Any]) -> Any:
        """An arbitrary function of that name, a different one for each number of arguments."""
        total: Any = Fraction(0)
        for at, argument in enumerate(arguments):
            a, b, c = (Fraction(zlib.crc32(f"{name} {at} {k}".encode()) % 97 + 1) for k in range(3))
            squared = multiply(argument, argument)
            total = add(total, divide(add(multiply(a, argument), b), add(squared, c)))
        return total

    def _logarithm(self, value: Any) -> Any:
        if value == 0 or (not self._is_complex and not value > 0):
            raise NoValueError
        return checked(context().ln(widened(value)))

    def _power(self, base: Any, exponent: Any) -> Any:
        base, exponent = snapped(base), snapped(exponent)
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            return self._whole_power(base, int(exponent))
        if base == 0:
            if isinstance(exponent, Fraction) and exponent > 0:
                return Fraction(0)
            raise NoValueError
        is_real = isinstance(base, Fraction) or not isinstance(base, context().mpc)
        if isinstance(exponent, Fraction) and is_real:
            if base < 0 and exponent.denominator % 2 and not self._is_complex:
                root = self._power(-base, exponent)  # the real root: the third one of -8 is -2
                return -root if exponent.numerator % 2 else root
            if isinstance(base, Fraction) and base > 0 and (root := exact_root(base, exponent.denominator)) is not None:
                return self._whole_power(root, exponent.numerator)
        ctx = context()
        logarithm = widened(self._logarithm(base)) * widened(exponent)
        if ctx.mag(logarithm) > 9:
            raise TooLargeError
        return checked(ctx.exp(logarithm))

    def _whole_power(self, base: Any, exponent: int) -> Any:
        if abs(exponent) > MAX_POWER:
            raise TooLargeError
        if base == 0 and exponent <= 0:
            raise NoValueError
        if isinstance(base, Fraction):
            size = max(base.numerator.bit_length(), base.denominator.bit_length())
            if size * abs(exponent) > MAX_BITS and abs(base) != 1:
                raise TooLargeError
            return base**exponent
        if abs(context().mag(base) * exponent) > 2 * MAX_MAGNITUDE:
            raise TooLargeError
        return checked(base**exponent)

    def _function(self, name: str, *values: Any) -> Any:
        if name in WHOLE_NUMBER_FUNCTIONS:
            return WHOLE_NUMBER_FUNCTIONS[name](*map(snapped, values))
        (value,) = values
        if name == "ln":
            return self._logarithm(value)
        ctx = context()
        if name == "abs":
            return abs(value)
        if name == "degree":
            return value
        wide = widened(value)
        if ctx.mag(wide) > (8 if name in ("sinh", "cosh", "tanh") else 20):
            raise TooLargeError
        if name in _INVERSE:
            is_outside = name in ("arcsin", "arccos") and not self._is_complex and abs(wide) > 1
            if is_outside:
                raise NoValueError
            return checked(getattr(ctx, _INVERSE[name])(wide))
        if name in _QUOTIENTS:
            above, below = _QUOTIENTS[name]
            return divide(self._plain(above, wide), self._plain(below, wide))
        return self._plain(name, wide)

    def _plain(self, name: str, value: Any) -> Any:
        return Fraction(1) if name == "one" else checked(getattr(context(), name)(value))


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": add,
    "sub": lambda first, second: add(first, second, -1),
    "mul": multiply,
    "div": divide,
    "neg": lambda value: -value,
}
_INVERSE = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "arcsec": "asec", "arccsc": "acsc",
            "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh"}  # fmt: skip
_QUOTIENTS = {"tan": ("sin", "cos"), "cot": ("cos", "sin"), "sec": ("one", "cos"), "csc": ("one", "sin"),
              "tanh": ("sinh", "cosh"), "coth": ("cosh", "sinh")}  # fmt: skip
_TRIGONOMETRY = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))
