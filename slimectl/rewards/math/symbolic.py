"""Symbolic equivalence, by math-verify, of formulas that we do not read ourselves; at a bounded cost."""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache
from typing import Any

MAX_CHARACTERS = 200
MAX_DIGITS = 50
MAX_NODES = 300
MAX_DEPTH = 16
MAX_LOG10 = 1000.0
"""Log10 of the largest number that an expression may evaluate to."""

_UNSAFE = re.compile(
    r"\\(?:int|iint|oint|sum|prod|lim|partial|nabla|text|mathbb|input|write)(?![A-Za-z])|gcd|lcm|rref|det|vmatrix"
)
_SKIPPED = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|\d\s*_|\.\.|:|=|\d\s+\d|\\(?:l?dots|approx|ne|sim)(?![A-Za-z])")
_LARGE_BINOMIAL = re.compile(r"\\[dt]?binom(?!\s*\{[\w+-]{1,5}\}\s*\{[\w+-]{1,5}\})")
_TOWER = re.compile(r"\^[^()]*\)\s*\^|\^\s*\{[^{}]*\^|\^\s*\{?\s*-?\d{4}")
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_SAFE_FUNCTIONS = re.compile("log|a?(?:sin|cos|tan)|cot|sec|csc|Abs|floor|ceiling|Min|Max|re|im")
_COMBINATORIAL_ARGUMENT = 3.0


class TooLargeError(Exception):
    """The expression would cost too much to evaluate."""


def symbolically_equal(label: str, answer: str) -> bool:
    """Whether math-verify finds two formulas of the same parts equal, with decimals as exact fractions.

    It skips what it does not understand, and would find 42... equal to 42: so only a formula of the same letters,
    digits and commands in another order is tried, and no text with words, ellipses, ratios or numerals of a base.
    Expressions of unbounded cost are not tried and count as unequal: texts over 200 characters or 16 brackets deep,
    integrals, sums, limits, determinants, gcd and lcm, nested binomials, numbers of over 1000 digits. Never raises.
    """
    if not (_is_worth_parsing(label) and _is_worth_parsing(answer)) or _parts(label) != _parts(answer):
        return False
    try:
        real = not _is_complex(label + " " + answer)
        expected, actual = _parse(label, real), _parse(answer, real)
        if expected is None or actual is None:
            return False
        if _differ_at_a_point(expected, actual):
            return False
        from math_verify.grader import verify

        return bool(verify(expected, actual, timeout_seconds=None, allow_set_relation_comp=True))
    except Exception:  # a failure of the parser or simplifier counts as unequal
        return False


def _is_worth_parsing(text: str) -> bool:
    if not 0 < len(text) <= MAX_CHARACTERS or _SKIPPED.search(text) or _UNSAFE.search(text) or text.count("^") > 12:
        return False
    # math-verify also compares the ends of intervals, and so evaluates them.
    if "," in text and _TOWER.search(text):
        return False
    if _depth(text) > MAX_DEPTH:  # the parser takes seconds for brackets that never close
        return False
    longest = max(map(len, re.findall(r"\d+", text)), default=0)
    # The parser itself evaluates binomials (and gcd, det and the like), before there is a tree to inspect.
    return longest <= (3 if "binom" in text else MAX_DIGITS) and not _LARGE_BINOMIAL.search(text)


def _parts(text: str) -> list[str]:
    """Commands, names and numbers, sorted."""
    return sorted(re.findall(r"\\[A-Za-z]+|[A-Za-z]|[\d.]+", text))


def _depth(text: str) -> int:
    """Maximum nesting depth of brackets."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _is_complex(text: str) -> bool:
    from math_verify.grader import should_treat_as_complex

    # Its warning about a missing time limit would reach stderr: the grader sets the limit.
    logging.getLogger("math_verify.grader").setLevel(logging.ERROR)
    return bool(should_treat_as_complex(text))


@lru_cache(maxsize=4096)
def _parse(text: str, real: bool) -> Any:
    """Parse into an unevaluated expression; None if it cannot be parsed or is too large."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex  # type: ignore[import-untyped]

    config = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    exact = _DECIMAL.sub(lambda match: f"{{\\frac{{{match[1]}{match[2]}}}{{{10 ** len(match[2])}}}}}", text)
    try:
        expression = latex2sympy(
            normalize_latex(exact, config=config), is_real=real, convert_degrees=False, normalization_config=None
        )
        _size(expression, [MAX_NODES])
    except Exception:
        return None
    return expression


def _size(node: Any, budget: list[int]) -> float:
    """Log10 of an upper bound on the node's value (0 for symbols). Raises TooLargeError."""
    budget[0] -= 1
    if budget[0] < 0:
        raise TooLargeError
    kind = type(node).__name__
    if kind in ("Sum", "Product", "Integral", "Limit", "Derivative"):
        raise TooLargeError
    if getattr(node, "is_Rational", False):
        return math.log10(max(abs(node.p), node.q, 1)) if max(abs(node.p), node.q) else 0.0
    if kind in ("Pow", "MatPow", "exp"):
        return _size_of_power(node, budget)
    sizes = [_size(argument, budget) for argument in getattr(node, "args", ())]
    if kind in ("MutableDenseMatrix", "ImmutableDenseMatrix"):
        sizes = [_size(entry, budget) for entry in node.flat()]
    size = sum(sizes) if kind == "Mul" else max(sizes, default=0.0) + 1
    if getattr(node, "is_Function", False) and not _SAFE_FUNCTIONS.fullmatch(kind):
        if max(sizes, default=0.0) > _COMBINATORIAL_ARGUMENT:
            raise TooLargeError
        size = 2600.0 if kind in ("factorial", "factorial2", "subfactorial", "gamma") else MAX_LOG10
    elif size > MAX_LOG10 and not any(argument > MAX_LOG10 for argument in sizes):
        raise TooLargeError
    return size


def _size_of_power(node: Any, budget: list[int]) -> float:
    base, exponent = (node.base, node.exp) if type(node).__name__ != "exp" else (1, node.args[0])
    base_size = 0.5 if base == 1 else _size(base, budget)
    exponent_size = _size(exponent, budget)
    if any(type(inner).__name__ in ("Pow", "exp") and inner.exp.free_symbols for inner in _subexpressions(exponent)):
        raise TooLargeError  # towers of symbols explode at any evaluation point
    if exponent.free_symbols:
        return base_size
    many = getattr(base, "is_Add", False) and getattr(base, "free_symbols", None)
    if exponent_size > (1.5 if many else 4.0):
        raise TooLargeError
    size = max(base_size, 0.5) * float(10**exponent_size)
    if size > MAX_LOG10 and not getattr(base, "is_Symbol", False):
        raise TooLargeError
    return size if size <= MAX_LOG10 else 0.0


def _subexpressions(expression: Any) -> list[Any]:
    from sympy import preorder_traversal  # type: ignore[import-untyped]

    return list(preorder_traversal(expression))


def _differ_at_a_point(expected: Any, actual: Any) -> bool:
    """Whether two plain expressions clearly differ at a point, which avoids an expensive `simplify`.

    Points are positive, off the branch cuts of roots and logarithms. False is inconclusive.
    """
    from sympy import Expr

    if not (isinstance(expected, Expr) and isinstance(actual, Expr)):
        return False
    try:
        values = _values(expected, actual)
    except Exception:
        return False
    if not all(math.isfinite(abs(value)) for value in values):
        return False
    return abs(values[0] - values[1]) > 1e-9 * max(1.0, *map(abs, values))


def _values(expected: Any, actual: Any) -> tuple[complex, complex]:
    """Values of both expressions at a point of arbitrary positive fractions."""
    from sympy import Rational

    symbols = sorted(expected.free_symbols | actual.free_symbols, key=str)
    point = {symbol: Rational(37 + 10 * i, 53) for i, symbol in enumerate(symbols)}
    first, second = (complex(side.subs(point).evalf(20)) for side in (expected, actual))
    return first, second
