"""Filter expressions over records, such as `reward < 0.5 and metadata.level == "hard"`.

The syntax is a subset of Python expressions that cannot call anything: names and dotted names of a record's fields,
constants, lists of constants, `and`, `or`, `not`, comparisons, `in` and `+ - * /`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from slimectl.errors import SettingsError

MAX_LENGTH = 1000
"""Longest accepted expression in characters. It also limits nesting."""

COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
Evaluation = Callable[[Callable[[str], Any]], Any]
"""Takes a function that returns the value of a field."""
CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


class FilterExpression:
    """A condition on a record.

    >>> FilterExpression("reward >= 0.5 and 'cat' in response").matches({"reward": 1.0, "response": "a cat"})
    True

    A field that a record lacks is None. A comparison of values that cannot be compared is false. Raises SettingsError
    for an invalid expression.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_LENGTH:
            raise SettingsError(f"filter: {len(text)} characters are too many. The limit is {MAX_LENGTH}.")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise SettingsError(
                f"filter: {text!r} is not a valid expression. Example: reward < 0.5 and 'x' in response"
            ) from None
        self._evaluate = _compiled(tree)
        self.names = frozenset(name for node in ast.walk(tree) if (name := _field_name(node)) is not None)
        """Dotted names of the fields that the expression reads."""

    def matches(self, record: Mapping[str, Any], known: Mapping[str, Any] = MappingProxyType({})) -> bool:
        """Return whether the record meets the condition. Values in `known` override the record's values."""
        return bool(self._evaluate(lambda name: known[name] if name in known else field_of(record, name)))


def _compiled(node: ast.AST) -> Evaluation:
    """Return a function that evaluates a part of an expression. Raises SettingsError for any other syntax."""
    match node:
        case ast.BoolOp(op=op, values=parts):
            combine = all if isinstance(op, ast.And) else any
            values = [_compiled(part) for part in parts]
            return lambda field: combine(value(field) for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = _compiled(operand)
            return lambda field: not value(field)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _compiled(operand)
            return lambda field: _apply(operator.neg, value(field))
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right=right):
            function, first, second = ARITHMETIC[type(op)], _compiled(left), _compiled(right)
            return lambda field: _apply(function, first(field), second(field))
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_compiled(part) for part in (left, *others)]
            return lambda field: all(
                _compare(op, *pair) for op, pair in zip(ops, pairwise([value(field) for value in values]), strict=True)
            )
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            values = [_compiled(part) for part in parts]
            return lambda field: [value(field) for value in values]
        case ast.Constant(value=str() | int() | float() | None as constant):
            return lambda field: constant
        case _ if (name := _field_name(node)) is not None:
            default = CONSTANTS.get(name.lower())
            return lambda field: default if (found := field(name)) is None else found
    part = ast.unparse(node)[:60]
    raise SettingsError(
        f"filter: {part!r} is not allowed in a filter. Compare fields, as in: reward < 0.5 and 'x' in response"
    )


def _field_name(node: ast.AST) -> str | None:
    """Return the dotted name of a node, or None if it is not a name."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            prefix = _field_name(value)
            return None if prefix is None else f"{prefix}.{attr}"
    return None


def field_of(record: Mapping[str, Any], name: str) -> Any:
    """Return the value under a dotted name, or None if the record has none."""
    return reduce(lambda value, key: value.get(key) if isinstance(value, Mapping) else None, name.split("."), record)  # type: ignore[arg-type, return-value]


def _apply(function: Callable[..., Any], *values: Any) -> Any:
    numbers = all(isinstance(value, int | float) for value in values)
    try:
        return function(*values) if numbers else None
    except (ZeroDivisionError, OverflowError):
        return None


def _compare(op: ast.cmpop, left: Any, right: Any) -> bool:
    """Compare two values. `in` searches for a string in the text of any value."""
    try:
        if isinstance(op, ast.In | ast.NotIn):
            contains = left in right if isinstance(right, list | dict | str) else False
            return bool(contains) == isinstance(op, ast.In)
        if isinstance(op, ast.Is | ast.IsNot):
            return (left is right) == isinstance(op, ast.Is)
        return bool(COMPARISONS[type(op)](left, right))
    except TypeError:
        return False
