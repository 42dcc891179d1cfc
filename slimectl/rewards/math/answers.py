"""Parses answers into a normal form: numbers, expressions, lists, tuples, sets, equations, matrices, words."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from slimectl.rewards.math.expressions import Tree, parse_expression
from slimectl.rewards.math.leaves import MathAnswer, closes_at, parse_leaf, split
from slimectl.rewards.math.matrices import BLOCK, is_grid, matrix_value, rows_of
from slimectl.rewards.math.operators import shielded
from slimectl.rewards.math.regions import EMPTY, REALS, Region, complement, intersection, interval, solution, union
from slimectl.rewards.math.tokens import GREEK
from slimectl.rewards.math.units import unwrap_text
from slimectl.rewards.math.values import constant_value, equal_values, symbols

MAX_DEPTH = 6
MAX_ITEMS = 64

_SUBSCRIPT = r"(?:_(?:\w|\{[^{}]{1,24}\}|\\[A-Za-z]+))?"
_DECORATION = (
    r"(?:\\(?:vec|hat|bar|overline|overrightarrow|angle|triangle|measuredangle|boldsymbol|mathcal|mathbf)\s*)*"
)
_PLAIN_NAME = rf"{_DECORATION}\{{?(?:\\(?:{'|'.join(sorted(GREEK))})(?![A-Za-z])|[A-Za-z]{{1,12}})\}}?\s*{_SUBSCRIPT}'*"
_NAME = re.compile(
    rf"{_PLAIN_NAME}(?:\s*\^\s*\{{-1\}})?(?:\s*\(\s*[^()=]{{1,20}}\s*\))?|\|\s*{_PLAIN_NAME}\s*\|"
    rf"|{_PLAIN_NAME}(?:\s*:\s*{_PLAIN_NAME})+|\(\s*{_PLAIN_NAME}(?:\s*,\s*{_PLAIN_NAME})+\s*\)"
    r"|\\frac\s*\{d\s*[a-z]?\}\s*\{d\s*[a-z]\}|[A-Za-z]{2,}(?: [A-Za-z]{2,}){1,4}"
)
_SIDES = re.compile(r"=|\\approx(?![A-Za-z])")
_RELATION = re.compile(r"<|>|\\(?:le|ge|ne)(?![A-Za-z])")
_VECTORS = re.compile(r"\([^()]*,[^()]*\)\s*(?:[-+^]|\\cdot|[a-z]$)|[-+\da-z}]\s*\([^()]*,[^()]*\)$")
"""A sum or a multiple of tuples."""

_REGIONS: dict[str, Region] = {r"\emptyset": EMPTY, r"\{\}": EMPTY, "emptyset": EMPTY, r"\reals": REALS, "ℝ": REALS,
                               "allrealnumbers": REALS, "allreals": REALS, "realnumbers": REALS}  # fmt: skip


@lru_cache(maxsize=4096)
def parse_answer(text: str, depth: int = 0) -> MathAnswer:
    """Parse a tidy answer. Beyond 6 levels or 64 items it counts as text."""
    text = _without_parentheses(shielded(text.strip()))
    if depth == MAX_DEPTH or not text:
        return MathAnswer("text", text)
    if (region := _REGIONS.get(re.sub(r"\s+", "", unwrap_text(text)).removesuffix("."))) is not None:
        return MathAnswer("region", text, region=region)
    if len(parts := split(text)) > 1:
        return _list(text, parts, depth)
    if r"\begin" in text:
        return _matrix_chain(text, depth)
    if named := _named(text, depth):
        return named
    answer = _chain(text) or _relation(text) or _collection(text, depth) or parse_leaf(text)
    return (_expressed(text) if answer.kind == "text" and _VECTORS.search(text) else None) or answer


def region_of(answer: MathAnswer) -> Region | None:
    """Return an interval, an inequality, a union or a finite set as a set of reals, or None for other answers."""
    if answer.kind == "region":
        return answer.region
    if answer.kind == "tuple" and len(answer.items) == 2 and all(item.kind == "scalar" for item in answer.items):
        return interval(answer.brackets, answer.items[0].tree, answer.items[1].tree)
    return None


def _without_parentheses(text: str) -> str:
    """Return the text without parentheses around the whole of it, unless they make a tuple."""
    for _ in range(MAX_ITEMS):
        if not text.startswith("(") or closes_at(text) != len(text) - 1 or len(split(text[1:-1])) > 1:
            break
        text = text[1:-1].strip()
    return text


def _list(text: str, parts: list[str], depth: int) -> MathAnswer:
    if len(parts) > MAX_ITEMS:
        return MathAnswer("text", text)
    first = _split_name(parts[0])
    if first and not any(_SIDES.search(part) or _RELATION.search(part) for part in parts[1:]) and first[0][:1] != "(":
        inner = parse_answer(", ".join([first[1], *parts[1:]]), depth + 1)
        return replace(inner, name=first[0])  # x = 1, 2
    items = tuple(parse_answer(part, depth + 1) for part in parts)
    names = {item.name for item in items}
    regions = [region for item in items if (region := _points(item)) is not None]
    if len(regions) == len(items) and len(names - {""}) == 1 and any(item.kind == "region" for item in items):
        common = intersection(regions)  # x > 1, x < 2 means both, and x < 1, x > 2 means either
        return MathAnswer("region", text, region=common or union(regions), name=max(names))
    if len(names) == 1 and names != {""}:  # x=1, x=2, whereas x=1, y=2 keeps its names
        return MathAnswer("list", text, tuple(_flat([replace(item, name="") for item in items])), name=max(names))
    return MathAnswer("list", text, tuple(_flat(items)))


def _flat(items: list[MathAnswer] | tuple[MathAnswer, ...]) -> list[MathAnswer]:
    r"""Flatten the items of \pm into the list."""
    return [
        inner for item in items for inner in (item.items if item.kind == "list" and item.brackets == "±" else [item])
    ]


def _split_name(text: str) -> tuple[str, str] | None:
    r"""Split `name = value`, `name \in value` into name and value, or return None for other texts."""
    match = re.match(r"(.*?)(?:=|\\in(?![A-Za-z])|\\approx(?![A-Za-z]))(.+)", text, re.DOTALL)
    if match is None:
        return None
    name = re.sub(r"\s+", " ", unwrap_text(match[1])).strip()
    return (re.sub(r"\s+", "", name), match[2].strip()) if _NAME.fullmatch(name) else None


def _named(text: str, depth: int) -> MathAnswer | None:
    """Return the value of `x = 5` with its name, or None if the text is not an assignment."""
    pair = _split_name(text)
    if pair is None or _RELATION.search(text):
        return None
    value = _chain(pair[1]) if _SIDES.search(pair[1]) else parse_answer(pair[1], depth + 1)
    if value is None:
        return MathAnswer("text", text)
    sides = tuple(parse_expression(unwrap_text(side)) for side in text.split("=")) if text.count("=") == 1 else ()
    equation = tuple(side for side in sides if side is not None)
    return replace(value, name=pair[0], sides=equation if len(equation) == 2 else ())


def _chain(text: str) -> MathAnswer | None:
    r"""Return an equation of two sides, or the value of a chain of equal sides (2 + 3 = 5), or None."""
    sides = [side.strip() for side in _SIDES.split(text)]
    if len(sides) == 1 or _RELATION.search(text):
        return None
    leaves = [parse_leaf(side) for side in sides]
    trees = [leaf.tree for leaf in leaves if leaf.tree is not None]
    if len(trees) != len(sides):
        return MathAnswer("text", text)
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not symbols(trees[0]):
        return replace(leaves[0], name=sides[1])  # 5 = x
    signs = _SIDES.findall(text)
    for (before, after), sign in zip(pairwise(trees), signs, strict=True):
        is_equal = equal_values(before, after) if sign == "=" else _are_close(before, after)
        if not is_equal:
            is_equation = len(sides) == 2 and sign == "=" and (symbols(before) or symbols(after))
            return MathAnswer("equation" if is_equation else "text", text, sides=tuple(trees) if is_equation else ())
    if len(sides) == 2 and signs == ["="] and symbols(trees[0]):
        return MathAnswer("equation", text, sides=tuple(trees))
    return replace(leaves[-1], alternatives=tuple(leaves[:-1]) if "=" not in signs else ())


def _are_close(first: Tree, second: Tree) -> bool:
    values = constant_value(first), constant_value(second)
    return None not in values and abs(float(values[0]) - float(values[1])) <= 0.01 * abs(float(values[0]))


def _relation(text: str) -> MathAnswer | None:
    parts = [part.strip() for part in _RELATION.split(text)]
    if len(parts) == 1 or len(parts) > 4 or "=" in text:
        return None
    sides = tuple(tree for part in parts if (tree := parse_leaf(part).tree) is not None)
    operators = tuple(_RELATION.findall(text))
    upward = not {">", r"\ge"} & set(operators)
    if len(sides) < len(parts) or (len(parts) > 2 and not upward and {"<", r"\le"} & set(operators)):
        return None
    if not upward:  # 3 > x is x < 3
        sides, operators = sides[::-1], tuple({">": "<", r"\ge": r"\le"}.get(sign, sign) for sign in operators[::-1])
    solved = solution(sides, operators)
    if solved:
        return MathAnswer("region", text, region=solved[1], name=solved[0])
    return MathAnswer("relation", text, sides=sides, operators=operators)


def _collection(text: str, depth: int) -> MathAnswer | None:
    """Parse a union, intersection, difference, set, tuple or interval. A plus-minus sign makes two values."""
    for separator in (r"\cup", r"\cap", r"\setminus", r"\backslash"):
        if len(parts := split(text, separator)) > 1:
            return _union(text, parts, depth, separator)
    if text.startswith(r"\{") and text.endswith(r"\}") and closes_at(text) == len(text) - 1:
        return _set(text, text[2:-2].strip(), depth)
    if text[:1] in ("(", "[") and closes_at(text) == len(text) - 1 and len(parts := split(text[1:-1])) > 1:
        if len(parts) > MAX_ITEMS:
            return MathAnswer("text", text)
        items = tuple(parse_answer(part, depth + 1) for part in parts)
        brackets = text[0] + text[-1]
        if brackets == "[]" and all(item.kind == "tuple" and item.brackets == "[]" for item in items):
            return MathAnswer("matrix", text, tuple(MathAnswer("tuple", item.text, item.items) for item in items))
        return MathAnswer("tuple", text, items, brackets)
    if text.count(r"\pm") == 1 and r"\mp" not in text:
        values = [re.sub(r"\\pm\s*", sign, text).strip().removeprefix("+") for sign in "+-"]
        return MathAnswer("list", text, tuple(parse_answer(value, depth + 1) for value in values), "±")
    return None


def _set(text: str, inner: str, depth: int) -> MathAnswer:
    if builder := re.fullmatch(r"([A-Za-z])\s*(?:\\in\s*\\reals\s*)?[|:](.+)", inner, re.DOTALL):
        return parse_answer(builder[2], depth + 1)
    parts = split(inner)
    items = tuple(parse_answer(part, depth + 1) for part in parts)
    if len(parts) > MAX_ITEMS or (len(items) == 1 and items[0].kind == "region"):
        return MathAnswer("text", text)  # the set of the empty set is not the empty set
    if len(items) == 1 and items[0].brackets != "±":
        return items[0]
    return MathAnswer("list", text, tuple(_flat(items)))


def _union(text: str, parts: list[str], depth: int, separator: str) -> MathAnswer:
    if len(parts) > MAX_ITEMS:
        return MathAnswer("text", text)
    items = tuple(parse_answer(part, depth + 1) for part in parts)
    regions = [
        region
        for part, item in zip(parts, items, strict=True)
        if (region := _points(item) if part.startswith(r"\{") else region_of(item)) is not None
    ]
    if len(regions) == len(items):
        if separator in (r"\cup", r"\cap"):
            return MathAnswer("region", text, region=(union if separator == r"\cup" else intersection)(regions))
        if len(regions) == 2:
            return MathAnswer("region", text, region=intersection([regions[0], complement(regions[1])]))
    operator = {r"\cup": "∪", r"\cap": "∩"}.get(separator)
    return MathAnswer("list", text, items, operator) if operator else MathAnswer("text", text)


def _points(answer: MathAnswer) -> Region | None:
    """Return the region of an answer that may also be numbers: {1, 2}, or x = 2 in `x = 2 or x > 3`."""
    if answer.kind == "region":
        return answer.region
    points = answer.items if answer.kind == "list" else (answer,)
    regions = [region for point in points if (region := interval("[]", point.tree, point.tree)) is not None]
    return union(regions) if len(regions) == len(points) else None


def _matrix_chain(text: str, depth: int) -> MathAnswer:
    """Return the last side of A = 2B = M as a matrix with the name A, or text if the sides are not equal."""
    collected = text[-1:] in ")]}" and _collection(text, depth)
    if collected and collected.kind in ("tuple", "list") and collected.brackets != "±":
        return collected
    sides = split(text, "=")
    is_named = len(sides) > 1 and r"\begin" not in sides[0] and re.search("[A-Za-z]", sides[0])
    name = re.sub(r"\s+", "", unwrap_text(sides[0])) if is_named else ""
    values = [_matrix(side, depth) for side in (sides[1:] if name else sides)]
    if not all(value.kind == values[0].kind in ("matrix", "scalar", "tuple") for value in values):
        return MathAnswer("text", text)
    if not all(_same_entries(before, after) for before, after in pairwise(values)):
        return MathAnswer("text", text)
    return replace(values[-1], name=name)


def _same_entries(first: MathAnswer, second: MathAnswer) -> bool:
    if first.tree and second.tree:
        return equal_values(first.tree, second.tree)
    return len(first.items) == len(second.items) > 0 and all(map(_same_entries, first.items, second.items))


def _matrix(text: str, depth: int) -> MathAnswer:
    """Return a matrix with any answers as cells, or the value of an expression of matrices."""
    if (match := BLOCK.fullmatch(text)) and not match["det"] and match["name"] != "vmatrix":
        if bool(match["open"]) != bool(match["close"]):
            return MathAnswer("text", text)
        cells = rows_of(match["body"])
        if sum(map(len, cells)) > MAX_ITEMS:
            return MathAnswer("text", text)
        return MathAnswer(
            "matrix",
            text,
            tuple(MathAnswer("tuple", "", tuple(parse_answer(cell, depth + 1) for cell in row)) for row in cells),
        )
    return _expressed(text) or MathAnswer("text", text)


def _expressed(text: str) -> MathAnswer | None:
    """Return the value of an expression of matrices or tuples, or None if it cannot be read."""
    value = matrix_value(text)
    if value is None:
        return None
    if not is_grid(value):
        return MathAnswer("scalar", text, tree=value)
    rows = [tuple(MathAnswer("scalar", "", tree=entry) for entry in row) for row in value]
    if r"\begin" not in text and len(rows) == 1:
        return MathAnswer("tuple", text, rows[0], "()")
    return MathAnswer("matrix", text, tuple(MathAnswer("tuple", "", row) for row in rows))
