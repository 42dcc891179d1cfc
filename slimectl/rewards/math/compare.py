"""Equality of answers in normal form."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from slimectl.rewards.math.answers import parse_answer, region_of
from slimectl.rewards.math.latex import tidy
from slimectl.rewards.math.leaves import MathAnswer
from slimectl.rewards.math.regions import same_region
from slimectl.rewards.math.spelling import spelling
from slimectl.rewards.math.values import equal_values, proportional

_LOCK = threading.RLock()
"""One thread computes values at a time, because mpmath's functions change their shared precision."""


_COSTLY = (ArithmeticError, ValueError, TypeError, RecursionError)
"""Raised for values without an order or beyond our limits."""


def same_answer(label: str, answer: str) -> bool:
    r"""Whether two texts are the same answer by their normal forms.

    >>> same_answer("3/2", "1 1/2"), same_answer("12", "1 2"), same_answer(r"x \ge 2", r"[2, \infty)")
    (True, False, True)
    """
    with _LOCK:
        label, answer = tidy(label), tidy(answer)
        if spelling(label) == spelling(answer) != "":
            return True
        try:
            return _same(parse_answer(label), parse_answer(answer))
        except _COSTLY:
            return False


def _same(first: MathAnswer, second: MathAnswer) -> bool:
    if first.name and second.name and first.name != second.name:
        return _same_equation(first, second) or _same_components(first, second)
    if first.kind == second.kind:
        return _SAME[first.kind](first, second) or _same_equation(first, second) or _same_alternatives(first, second)
    kinds = {first.kind, second.kind}
    if kinds == {"scalar", "ratio"}:
        ratio, scalar = (first, second) if first.kind == "ratio" else (second, first)
        parts = [part.tree for part in ratio.items if part.tree]
        return (
            len(parts) == 2 and not ratio.brackets and scalar.tree is not None and scalar.tree[0] == "div"
            and equal_values(("div", *parts), scalar.tree)
        )  # fmt: skip
    if kinds == {"time", "ratio"} or kinds == {"time", "scalar"}:
        time, other = (first, second) if first.kind == "time" else (second, first)
        return _same_times(time.text, other.brackets or (f"~{other.text}:00:00" if other.kind == "scalar" else ""))
    if kinds == {"list", "tuple"} and _same_components(first, second):
        return True
    if "region" in kinds or kinds == {"list", "tuple"}:
        regions = [region for answer in (first, second) if (region := region_of(answer)) is not None]
        return len(regions) == 2 and same_region(*regions)
    return _same_equation(first, second)


def _same_scalars(first: MathAnswer, second: MathAnswer) -> bool:
    infinities = [_infinity(answer) for answer in (first, second)]
    if any(infinities):
        return infinities[0] == infinities[1]
    if first.unit and second.unit and first.unit != second.unit:
        return False
    return first.tree is not None and second.tree is not None and equal_values(first.tree, second.tree)


def _infinity(answer: MathAnswer) -> str:
    sign = "-" if answer.tree and answer.tree[0] == "neg" else "+"
    tree = answer.tree[1] if answer.tree and sign == "-" else answer.tree
    return sign if tree == ("const", "infinity") else ""


def _same_alternatives(first: MathAnswer, second: MathAnswer) -> bool:
    """Whether one side of an approximation (\\sqrt2 ≈ 1.414) is the other answer."""
    if bool(first.alternatives) == bool(second.alternatives):
        return False
    stated, single = (first, second) if first.alternatives else (second, first)
    return any(_same_scalars(value, single) for value in stated.alternatives)


def _same_equation(first: MathAnswer, second: MathAnswer) -> bool:
    """Whether two equations are multiples of each other: y = 2x + 1 and 4x - 2y + 2 = 0."""
    if not len(first.sides) == len(second.sides) == 2 or first.operators or second.operators:
        return False
    return proportional(("sub", *first.sides), ("sub", *second.sides))


def _same_relations(first: MathAnswer, second: MathAnswer) -> bool:
    if first.operators != second.operators:
        return False
    if len(first.sides) > 2:
        return all(map(equal_values, first.sides, second.sides))
    return proportional(("sub", *first.sides), ("sub", *second.sides), positive=first.operators != (r"\ne",))


def _same_lists(first: MathAnswer, second: MathAnswer) -> bool:
    operators = {first.brackets, second.brackets} - {"", "±"}  # a plus-minus sign makes an ordinary list
    same_shape = not operators or first.brackets == second.brackets
    return same_shape and _unordered(first.items, second.items)


def _unordered(first: Sequence[MathAnswer], second: Sequence[MathAnswer]) -> bool:
    if len(first) != len(second):
        return False
    unmatched = list(second)
    for item in first:
        match = next((candidate for candidate in unmatched if _same(item, candidate)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _ordered(first: MathAnswer, second: MathAnswer) -> bool:
    same_shape = first.brackets == second.brackets and len(first.items) == len(second.items)
    return same_shape and all(map(_same, first.items, second.items))


def _same_components(first: MathAnswer, second: MathAnswer) -> bool:
    """Whether x = 1, y = 2 is the other answer: (1, 2), or (x, y) = (1, 2)."""
    listed, point = (first, second) if first.kind == "list" else (second, first)
    if listed.kind != "list" or point.kind != "tuple" or point.brackets != "()" or listed.brackets:
        return False
    names = [item.name for item in listed.items]
    if not all(names) or len(set(names)) < len(names) or len(names) != len(point.items):
        return False
    if not point.name:
        return names == sorted(names) and all(map(_same, listed.items, point.items))
    order = point.name.strip("()").split(",")
    if sorted(order) != sorted(names):
        return False
    values = dict(zip(names, listed.items, strict=True))
    return all(_same(values[name], item) for name, item in zip(order, point.items, strict=True))


def _same_regions(first: MathAnswer, second: MathAnswer) -> bool:
    return first.region is not None and second.region is not None and same_region(first.region, second.region)


def _same_ratios(first: MathAnswer, second: MathAnswer) -> bool:
    """Whether two ratios are proportional. 3:30 and 1:10 are not, because they may be times of day."""
    if first.brackets and second.brackets:
        return first.brackets == second.brackets
    if len(first.items) != len(second.items):
        return False
    pairs = [(a.tree, b.tree) for a, b in zip(first.items, second.items, strict=True)]
    (a, b), *further = pairs
    return all(equal_values(("mul", a, d), ("mul", b, c)) for c, d in further if a and b and c and d)


def _same_times(first: str, second: str) -> bool:
    """Whether two times of `time_of_day` are the same. One of them may leave the half of the day open."""
    if first.lstrip("~") == second.lstrip("~") != "":
        return True
    if first[:1] == second[:1] or "~" not in (first[:1], second[:1]):
        return False
    stated, open_ = (second, first[1:]) if first[0] == "~" else (first, second[1:])
    hour, _, rest = open_.partition(":")
    return stated in (f"{int(hour) % 12}:{rest}", f"{int(hour) % 12 + 12}:{rest}") if hour.isdigit() else False


def _same_text(first: MathAnswer, second: MathAnswer) -> bool:
    return spelling(first.text) == spelling(second.text) != ""


def _same_words(first: MathAnswer, second: MathAnswer) -> bool:
    return spelling(first.text).casefold() == spelling(second.text).casefold()


_SAME: dict[str, Callable[[MathAnswer, MathAnswer], bool]] = {
    "scalar": _same_scalars,
    "words": _same_words,
    "text": _same_text,
    "list": _same_lists,
    "tuple": _ordered,
    "region": _same_regions,
    "matrix": _ordered,
    "numeral": _same_text,
    "ratio": _same_ratios,
    "time": lambda first, second: _same_times(first.text, second.text),
    "equation": lambda first, second: False,
    "relation": _same_relations,
}
