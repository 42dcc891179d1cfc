"""Exact arithmetic of fractions, and of irrational numbers with 320 digits. The cost of each result is bounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

DIGITS = 320
"""Decimal digits of irrational values."""

MAX_BITS = 12_000
"""Maximum size of a fraction's numerator or denominator."""

MAX_MAGNITUDE = 400
"""Largest binary exponent of an irrational value. Beyond it the digits cannot distinguish two values."""

ZERO_MAGNITUDE = -600
"""An irrational value below 2^-600 counts as 0 with a rounding error."""

MAX_POWER = 10_000
MAX_FACTORIAL = 1200
MAX_WHOLE = 10**60


class NoValueError(ArithmeticError):
    """The expression has no value there: a pole, or a root or logarithm of a negative number among the reals."""


class TooLargeError(ArithmeticError):
    """The value would cost too much to compute."""


@cache
def context() -> Any:
    """Return our own mpmath context. Its functions change its precision, so only one thread may use it at a time."""
    import mpmath  # type: ignore[import-untyped]

    clone = mpmath.mp.clone()
    clone.dps = DIGITS
    return clone


def is_less(first: Any, second: Any) -> bool:
    """Compare two real values, or infinities as floats. Values that differ only by rounding are equal."""
    if isinstance(first, float) or isinstance(second, float):
        return bool(_extended(first) < _extended(second))
    return bool(add(first, second, -1) < 0)


def same_value(first: Any, second: Any) -> bool:
    """Whether two values are equal, exactly if both are fractions, else up to rounding."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    return bool(add(first, second, -1) == 0)


def _extended(value: Any) -> float:
    return value if isinstance(value, float) else 0.0


def add(first: Any, second: Any, sign: int = 1) -> Any:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return checked(first + sign * second)
    return checked(widened(first) + sign * widened(second))


def divide(first: Any, second: Any) -> Any:
    if second == 0:
        raise NoValueError
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return checked(first / second)
    return checked(widened(first) / widened(second))


def widened(value: Any) -> Any:
    if isinstance(value, Fraction):
        return context().mpf(value.numerator) / value.denominator
    return value


def checked(value: Any) -> Any:
    """Normalise a value: zero if only a rounding error is left, and real if the imaginary part is zero."""
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise TooLargeError
        return value
    ctx = context()
    if isinstance(value, ctx.mpc):
        if value.imag == 0 or ctx.mag(value.imag) < ZERO_MAGNITUDE:
            value = value.real
        elif value.real != 0 and ctx.mag(value.real) < ZERO_MAGNITUDE:
            value = ctx.mpc(0, value.imag)
    if value == 0:
        return Fraction(0)
    if not ctx.isfinite(value):
        raise NoValueError
    magnitude = ctx.mag(value)
    if magnitude < ZERO_MAGNITUDE:
        return Fraction(0)
    if abs(magnitude) > MAX_MAGNITUDE:
        raise TooLargeError
    return value


def snapped(value: Any) -> Any:
    """Return a whole number with a rounding error as a fraction, and any other value unchanged."""
    if isinstance(value, Fraction):
        return value
    ctx = context()
    if isinstance(value, ctx.mpc) or ctx.mag(value) > 200:
        return value
    nearest = int(ctx.nint(value))
    return Fraction(nearest) if abs(value - nearest) < ctx.mpf(2) ** ZERO_MAGNITUDE else value


def multiply(first: Any, second: Any) -> Any:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return checked(first * second)
    return checked(widened(first) * widened(second))


def exact_root(value: Fraction, degree: int) -> Fraction | None:
    """Return the root of a positive fraction if it is a fraction too."""
    roots = []
    for number in (value.numerator, value.denominator):
        if degree > 64:
            return None
        guess = math.isqrt(number) if degree == 2 else _whole_root(number, degree)
        if guess**degree != number:
            return None
        roots.append(guess)
    return Fraction(*roots)


def _whole_root(number: int, degree: int) -> int:
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle - 1)
    return low


def _whole(value: Any, limit: int) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
        raise NoValueError
    if value > limit:
        raise TooLargeError
    return int(value)


def _factorial(value: Any) -> Any:
    if isinstance(value, Fraction) and value.denominator == 1:
        return checked(Fraction(math.factorial(_whole(value, MAX_FACTORIAL))))
    if not -1 < value < 60:
        raise NoValueError
    return checked(context().gamma(widened(value) + 1))


def _double_factorial(value: Any) -> Any:
    return checked(Fraction(math.prod(range(_whole(value, MAX_FACTORIAL), 1, -2))))


def _binomial(n: Any, k: Any) -> Any:
    if isinstance(n, Fraction) and isinstance(k, Fraction) and n.denominator == k.denominator == 1:
        total, chosen = _whole(n, MAX_WHOLE), _whole(k, MAX_WHOLE)
        if min(chosen, abs(total - chosen)) * total.bit_length() > 4 * MAX_BITS:
            raise TooLargeError
        return checked(Fraction(math.comb(total, chosen)))
    if isinstance(k, Fraction) and k.denominator == 1:
        result: Any = Fraction(1)
        for at in range(_whole(k, 60)):
            result = divide(multiply(result, add(n, Fraction(at), -1)), Fraction(at + 1))
        return result
    return divide(_factorial(n), multiply(_factorial(k), _factorial(add(n, k, -1))))


def _floor(value: Any) -> Any:
    return Fraction(math.floor(value) if isinstance(value, Fraction) else int(context().floor(value)))


def _ceiling(value: Any) -> Any:
    return -_floor(-value)


def _modulo(value: Any, modulus: Any) -> Any:
    if modulus == 0:
        raise NoValueError
    return add(value, multiply(modulus, _floor(snapped(divide(value, modulus)))), -1)


def _many(function: Callable[..., int]) -> Callable[..., Fraction]:
    return lambda *values: Fraction(function(*(_whole(value, MAX_WHOLE) for value in values)))


WHOLE_NUMBER_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "factorial": _factorial,
    "factorial2": _double_factorial,
    "binom": _binomial,
    "floor": _floor,
    "ceil": _ceiling,
    "mod": _modulo,
    "gcd": _many(math.gcd),
    "lcm": _many(math.lcm),
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
}
