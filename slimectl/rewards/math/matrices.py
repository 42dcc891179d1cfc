r"""Computes sums, products, powers, transposes, inverses and determinants of matrices and vectors."""

from __future__ import annotations

import re
from fractions import Fraction

from slimectl.rewards.math.expressions import Tree, parse_expression
from slimectl.rewards.math.units import unwrap_text

MAX_MATRICES = 8
MAX_ENTRIES = 64
MAX_POWER = 64
MAX_SIZE = 300
"""Nodes of an entry's tree."""

MAX_ORDER = 4
"""Most rows of a matrix whose inverse or determinant is computed."""

MAX_BITS = 2000

Grid = tuple[tuple[Tree, ...], ...]

BLOCK = re.compile(
    r"(?P<det>\\det\s*)?(?P<open>[\[(]\s*)?\\begin\{(?P<name>[pbBv]?(?:small)?matrix|array)\}(?:\s*\{[clr| ]*\})?"
    r"(?P<body>(?:(?!\\begin|\\end).)*)\\end\{(?P=name)\}(?P<close>\s*[\])])?",
    re.DOTALL,
)
_TUPLE = re.compile(
    r"(?<![fghFGHP_])(?<![A-Za-z\\][A-Za-z])\((?P<items>[^()\[\]{}=<>|;:]*(?:\{[^{}]*\}[^()\[\]{}=<>|;:]*)*)\)"
)
_TIMES = re.compile(r"\\(?:cdot|times)(?![A-Za-z])|(?<=\\mu)\s*(?=\()|(?<=\\lambda)\s*(?=\()|(?<=\\alpha)\s*(?=\()")
_TRANSPOSE = re.compile(
    r"\^\s*(?:\{\s*)?(?:\\(?:top|intercal|mathsf\s*\{\s*T\s*\}|mathrm\s*\{\s*T\s*\}|text\s*\{\s*T\s*\})|T|t)\s*\}?(?![A-Za-z])"
)


class NoMatrixError(Exception):
    """Raised for a text that is not an expression of matrices with matching shapes."""


def rows_of(body: str) -> list[list[str]]:
    r"""The cells of a matrix whose rows end by \cr."""
    rows = [row.strip() for row in re.sub(r"\\hline(?![A-Za-z])", "", body).split(r"\cr")]
    return [row.split("&") for row in (rows[:-1] if rows and not rows[-1] else rows)]


def matrix_value(text: str) -> Grid | Tree | None:
    r"""The value of an expression with matrices (\begin{pmatrix}...) or tuples: its entries, or a tree for a number.

    None if it cannot be read whole, if shapes do not fit, or if it would cost too much.
    """
    grids: list[Grid | Tree] = []
    try:
        return _value(_expression(text, grids), grids)
    except (NoMatrixError, ArithmeticError, RecursionError):
        return None


def _expression(text: str, grids: list[Grid | Tree]) -> Tree:
    r"""The tree of an expression in which the symbol "matrix 0" is the first of the grids."""

    def matrix(match: re.Match[str]) -> str:
        grid = tuple(tuple(map(_entry, row)) for row in rows_of(match["body"]))
        if len({len(row) for row in grid}) != 1 or len(grid) * len(grid[0]) > MAX_ENTRIES:
            raise NoMatrixError
        before, after = match["open"] or "", match["close"] or ""
        if match["name"][0] == "v" or match["det"]:
            return before + _referred(_determinant(grid), grids) + after
        return _referred(grid, grids) if before and after else before + _referred(grid, grids) + after

    def row(match: re.Match[str]) -> str:
        cells = re.split(r",(?![^{]*\})", match["items"])
        return match[0] if len(cells) == 1 else _referred((tuple(map(_entry, cells)),), grids)

    text = _TIMES.sub("*", text)
    text = BLOCK.sub(matrix, text) if r"\begin" in text else _TUPLE.sub(row, text)
    tree = parse_expression(_TRANSPOSE.sub(r"^{\\matrix{T}}", text))
    if tree is None:
        raise NoMatrixError
    return tree


def _referred(grid: Grid | Tree, grids: list[Grid | Tree]) -> str:
    grids.append(grid)
    if len(grids) > MAX_MATRICES:
        raise NoMatrixError
    return rf"\matrix{{{len(grids) - 1}}}"


def _entry(cell: str) -> Tree:
    tree = parse_expression(unwrap_text(cell).strip())
    if tree is None:
        raise NoMatrixError
    return _constant(tree)


def _constant(tree: Tree) -> Tree:
    """The tree, a fraction or a number with a sign as one number."""
    if tree[0] == "neg" and tree[1][0] == "num":
        return ("num", -tree[1][1])
    if tree[0] == "div" and all(part[0] == "num" for part in tree[1:]) and tree[2][1]:
        return ("num", tree[1][1] / tree[2][1])
    return tree


def is_grid(value: Grid | Tree) -> bool:
    return isinstance(value[0], tuple)


def _value(tree: Tree, grids: list[Grid | Tree]) -> Grid | Tree:
    kind = tree[0]
    if kind == "sym":
        return grids[int(tree[1][7:])] if re.fullmatch(r"matrix \d", tree[1]) else tree
    if kind == "pow" and tree[2] == ("sym", "matrix T"):
        return tuple(zip(*_grid(_value(tree[1], grids)), strict=True))
    if kind in ("num", "const"):
        return tree
    parts = [_value(part, grids) if isinstance(part, tuple) else part for part in tree[1:]]
    if not any(is_grid(part) for part in parts if isinstance(part, tuple)):
        return (kind, *parts)
    if kind == "neg":
        return _scaled(_grid(parts[0]), ("num", Fraction(-1)))
    if kind in ("add", "sub"):
        first, second = map(_grid, parts)
        if [len(row) for row in first] != [len(row) for row in second]:
            raise NoMatrixError
        rows = zip(first, second, strict=True)
        return tuple(tuple(_combined(kind, *pair) for pair in zip(*pairs, strict=True)) for pairs in rows)
    if kind == "mul":
        return _product(*parts)
    if kind == "div" and not is_grid(parts[1]):
        return tuple(tuple(_combined("div", entry, parts[1]) for entry in row) for row in _grid(parts[0]))
    if kind == "pow":
        return _power(_grid(parts[0]), _constant(parts[1]))
    if kind == "abs":
        return _determinant(_grid(parts[0]))
    raise NoMatrixError


def _grid(value: Grid | Tree) -> Grid:
    if not is_grid(value):
        raise NoMatrixError
    return value


def _scaled(grid: Grid, factor: Tree) -> Grid:
    return tuple(tuple(_combined("mul", factor, entry) for entry in row) for row in grid)


def _product(first: Grid | Tree, second: Grid | Tree) -> Grid | Tree:
    if not is_grid(first):
        return _scaled(_grid(second), first)
    if not is_grid(second):
        return _scaled(_grid(first), second)
    if len(first[0]) != len(second):
        raise NoMatrixError
    return tuple(tuple(_dot(row, column) for column in zip(*second, strict=True)) for row in first)


def _dot(first: tuple[Tree, ...], second: tuple[Tree, ...]) -> Tree:
    total: Tree = ("num", Fraction(0))
    for pair in zip(first, second, strict=True):
        total = _combined("add", total, _combined("mul", *pair))
    return total


def _power(grid: Grid, exponent: Tree) -> Grid:
    count = int(exponent[1]) if exponent[0] == "num" and exponent[1].denominator == 1 else 0
    if len(grid) != len(grid[0]) or not 0 < abs(count) <= MAX_POWER:
        raise NoMatrixError
    base = _inverse(grid) if count < 0 else grid
    power = base
    for _ in range(abs(count) - 1):
        power = _grid(_product(power, base))
    return power


def _determinant(grid: Grid) -> Tree:
    """The determinant, along the first row."""
    if len(grid) != len(grid[0]) or len(grid) > MAX_ORDER:
        raise NoMatrixError
    if len(grid) == 1:
        return grid[0][0]
    total: Tree = ("num", Fraction(0))
    for column, entry in enumerate(grid[0]):
        term = _combined("mul", entry, _determinant(_minor(grid, 0, column)))
        total = _combined("sub" if column % 2 else "add", total, term)
    return total


def _minor(grid: Grid, row: int, column: int) -> Grid:
    return tuple(line[:column] + line[column + 1 :] for at, line in enumerate(grid) if at != row)


def _inverse(grid: Grid) -> Grid:
    determinant, order = _determinant(grid), range(len(grid))
    if len(grid) == 1:
        return ((_combined("div", ("num", Fraction(1)), grid[0][0]),),)
    signs = [[("num", Fraction((-1) ** (row + column))) for column in order] for row in order]
    cofactors = [[_combined("mul", signs[j][i], _determinant(_minor(grid, j, i))) for j in order] for i in order]
    return tuple(tuple(_combined("div", entry, determinant) for entry in row) for row in cofactors)


def _combined(kind: str, first: Tree, second: Tree) -> Tree:
    """The tree of an operation, computed if both sides are numbers."""
    if first[0] == second[0] == "num":
        a, b = first[1], second[1]
        if kind == "div" and not b:
            raise NoMatrixError
        value = a + b if kind == "add" else a - b if kind == "sub" else a * b if kind == "mul" else a / b
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise NoMatrixError
        return ("num", value)
    if _size(first) + _size(second) > MAX_SIZE:
        raise NoMatrixError
    return (kind, first, second)


def _size(tree: Tree) -> int:
    return 1 + sum(_size(part) for part in tree[1:] if isinstance(part, tuple))
