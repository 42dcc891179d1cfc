"""Evaluates expressions of a Python file from their syntax: texts with their lines, tables, and known calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slimectl.migrate.launch_scripts.python_values import (
    COMPARISONS,
    FUNCTIONS,
    LIST_METHODS,
    MAX_MEMBERS,
    TABLE_METHODS,
    TEXT_METHODS,
    TOO_LONG,
    Function,
    Instance,
    Reference,
    Text,
    Unknown,
    Unreadable,
    bounded,
    calculated,
    joined,
    lifted,
    merged,
    plain,
    spread,
    to_text,
    truth,
)
from slimectl.migrate.launch_scripts.shell_values import MAX_TEXT, Leave
from slimectl.migrate.launch_scripts.shell_variables import is_secret_variable

MAX_STEPS = 30_000
SPEC = re.compile(r"[<>^]?[-+ ]?0?\d{0,3},?(?:\.\d{1,2})?[bdeEfFgGnosxX%]?")
"""Format specifications that only set a width."""
READABLE = (Unreadable, ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions from evaluating an expression whose value is unknown."""


def lines_of(node: ast.expr) -> tuple[int, int]:
    """The first and the last line of an expression."""
    return node.lineno, node.end_lineno or node.lineno


def size_of(value: Any) -> int:
    """The number of steps that a long text, list or table counts as."""
    characters = sum(len(piece.text) for piece in value.pieces) if isinstance(value, Text) else 0
    return characters >> 8 if characters else len(value) >> 4 if isinstance(value, list | dict) else 0


def source_of(node: ast.AST) -> str:
    """An expression in one line."""
    return " ".join(ast.unparse(node).split())


class Expressions:
    """The names of a program, and the values of its expressions. Statements are in python_program."""

    max_loop = MAX_MEMBERS
    """Maximum number of iterations of a loop that is followed."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.globals: dict[str, Any] = {"__name__": lifted("__main__", (1, 1))}
        self.frames: list[dict[str, Any]] = []
        self._steps = 0

    def apply(self, function: Any, call: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a call. Raises Unreadable if it is unknown."""
        raise Unreadable

    def attribute(self, owner: Any, name: str) -> Any:
        """An attribute of a value other than a text, list or table. Raises Unreadable if it is unknown."""
        raise Unreadable

    def store(self, target: ast.expr, value: Any) -> None:
        """Set a name, an attribute or an element."""
        raise NotImplementedError

    def count(self, steps: int = 1) -> None:
        """Count steps. Raises Leave after too many."""
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise Leave("limit")

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or an Unknown with its source if it cannot be determined from the file."""
        self.count()
        try:
            result = self._evaluated(node)
        except READABLE as error:
            self.count(1_000 if str(error) == TOO_LONG else 0)
            source = source_of(node)
            reason = str(error) if isinstance(error, Unreadable) and str(error) else ""
            return Unknown(source, reason or f"{source[:60]} is known when the program runs")
        self.count(size_of(result))
        return result

    def _evaluated(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=constant):
                return lifted(constant, lines_of(node))
            case ast.Name(id=name):
                frame = self.frames[-1] if self.frames else self.globals
                return frame.get(name, self.globals.get(name, Reference(name)))
            case ast.JoinedStr(values=parts):
                return joined(self._formatted(part, lines_of(node)) for part in parts)
            case ast.List(elts=members) | ast.Tuple(elts=members) | ast.Set(elts=members):
                return bounded(list(self._spread(members)))
            case ast.Dict(keys=keys, values=members):
                return self._table(keys, members)
            case ast.BinOp(left=left, op=operator, right=right):
                return calculated(self.value(left), operator, self.value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -plain(self.value(operand))
            case ast.NamedExpr(target=target, value=value):
                self.store(target, result := self.value(value))
                return result
            case ast.ListComp(elt=element, generators=loops) | ast.GeneratorExp(elt=element, generators=loops):
                return [self.value(element) for _ in self._comprehended(loops)]
            case ast.DictComp(key=key, value=value, generators=loops):
                return {plain(self.value(key)): self.value(value) for _ in self._comprehended(loops)}
            case ast.Attribute(value=owner, attr=name):
                return self.attribute(self.value(owner), name)
            case ast.Subscript(value=owner, slice=index):
                return self._element(self.value(owner), index, lines_of(node))
            case ast.Call():
                return self._called(node)
            case ast.Lambda():
                return Function(node, None, self.frames[-1] if self.frames else {})
        return self._decided(node)

    def _decided(self, node: ast.expr) -> Any:
        """The value of an expression that depends on conditions."""
        match node:
            case ast.BoolOp(op=operator, values=operands):
                value = None
                for operand in operands:
                    value = self.value(operand)
                    if self._certain(value) == isinstance(operator, ast.Or):
                        break
                return value
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._certain(self.value(operand))
            case ast.Compare():
                return self._compared(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                condition = truth(self.value(test))
                if condition is None:
                    reason = f"it depends on a condition that is not evaluated (line {test.lineno})"
                    return merged([self.value(body), self.value(orelse)], reason)
                return self.value(body if condition else orelse)
        raise Unreadable

    def _certain(self, value: Any) -> bool:
        if (result := truth(value)) is None:
            raise Unreadable
        return result

    def _formatted(self, part: ast.expr, lines: tuple[int, int]) -> Text:
        if not isinstance(part, ast.FormattedValue):
            return to_text(self.value(part), lines)
        value = self.value(part.value)
        if part.format_spec is None:
            return to_text(value, lines)
        spec = str(plain(self.value(part.format_spec)))
        if SPEC.fullmatch(spec) is None:
            return to_text(Unknown(ast.unparse(part.value), "its format is not read"), lines)
        return to_text(lifted(format(plain(value), spec), lines), lines)

    def _spread(self, members: Sequence[ast.expr]) -> Iterator[Any]:
        for member in members:
            value = self.value(member.value if isinstance(member, ast.Starred) else member)
            if isinstance(member, ast.Starred) and not isinstance(value, list):
                raise Unreadable(f"{ast.unparse(member)} is known when the program runs")
            yield from value if isinstance(member, ast.Starred) else [value]

    def _table(self, keys: Sequence[ast.expr | None], members: Sequence[ast.expr]) -> dict[Any, Any]:
        table: dict[Any, Any] = {}
        for key, member in zip(keys, members, strict=True):
            value = self.value(member)
            if key is None and not isinstance(value, dict):
                raise Unreadable
            table |= value if key is None else {plain(self.value(key)): value}
        return table

    def _compared(self, node: ast.Compare) -> bool:
        first = self.value(node.left)
        for operator, operand in zip(node.ops, node.comparators, strict=True):
            second = self.value(operand)
            is_object = isinstance(operator, ast.Is | ast.IsNot) and isinstance(first, Text | Instance | list | dict)
            values = (object(), second) if is_object else (plain(first), plain(second))
            if not COMPARISONS[type(operator)](*values):
                return False
            first = second
        return True

    def _comprehended(self, loops: Sequence[ast.comprehension]) -> Iterator[None]:
        """Set the variables of a comprehension for each combination."""
        if not loops:
            yield
            return
        members = self.value(loops[0].iter)
        if not isinstance(members, list | dict) or len(members) > self.max_loop:
            raise Unreadable
        for member in list(members):
            self.count()
            self.store(loops[0].target, member if isinstance(members, list) else lifted(member, (1, 1)))
            if all(self._certain(self.value(test)) for test in loops[0].ifs):
                yield from self._comprehended(loops[1:])

    def _element(self, owner: Any, index: ast.expr, lines: tuple[int, int]) -> Any:
        if isinstance(owner, Reference) and owner.name in ("os.environ", "environ"):
            return lifted(self.variable(plain(self.value(index)), None), lines)
        if isinstance(owner, Instance) and owner.kind is None:
            return self.attribute(owner, "[]")
        if isinstance(index, ast.Slice):
            ends = [plain(self.value(end)) if end else None for end in (index.lower, index.upper, index.step)]
            return lifted(plain(owner)[slice(*ends)], lines)
        key = plain(self.value(index))
        return owner[key] if isinstance(owner, dict | list) else lifted(plain(owner)[key], lines)

    def variable(self, name: str, default: Any) -> Any:
        """An environment variable. Raises Unreadable if it is not set and has no default."""
        if name in self.environ:
            return f"env:{name}" if is_secret_variable(name) else self.environ[name]
        if default is None:
            raise Unreadable(f"{name} is not set in the environment")
        return default

    def _called(self, call: ast.Call) -> Any:
        owner = self.value(call.func.value) if isinstance(call.func, ast.Attribute) else None
        arguments, keywords = list(self._spread(call.args)), self._keywords(call)
        if isinstance(call.func, ast.Attribute) and isinstance(owner, Text | list | dict):
            return self._method(owner, call, arguments, keywords)
        function = self.attribute(owner, call.func.attr) if isinstance(call.func, ast.Attribute) else None
        function = function or self.value(call.func)
        if isinstance(function, Reference):
            return self._built_in(function, call, arguments, keywords)
        return self.apply(function, call, arguments, keywords)

    def _keywords(self, call: ast.Call) -> dict[str, Any]:
        keywords: dict[str, Any] = {}
        for keyword in call.keywords:
            value = self.value(keyword.value)
            keywords |= spread(value) if keyword.arg is None else {keyword.arg: value}
        return keywords

    def _built_in(self, function: Reference, call: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        name, lines = function.name, lines_of(call)
        if name in ("os.environ.get", "os.getenv", "environ.get", "getenv"):
            default = arguments[1] if len(arguments) > 1 else keywords.get("default")
            return lifted(self.variable(plain(arguments[0]), default), lines)
        if name == "str" and len(arguments) == 1:
            return to_text(arguments[0], lines)
        if name in FUNCTIONS and not keywords:
            return lifted(FUNCTIONS[name](*map(plain, arguments)), lines)
        if name == "dict":
            return (spread(arguments[0]) if arguments else {}) | keywords
        if name in ("sys.exit", "exit", "quit"):
            raise Leave("exit")
        return self.apply(function, call, arguments, keywords)

    def _method(self, owner: Any, call: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a method of a text, a list or a table. Some methods change the object."""
        assert isinstance(call.func, ast.Attribute)
        name, lines = call.func.attr, lines_of(call)
        if not isinstance(owner, Text):
            methods = LIST_METHODS if isinstance(owner, list) else TABLE_METHODS
            if name not in methods:
                raise Unreadable(f"{name}() of a {'list' if methods is LIST_METHODS else 'table'} is not read")
            result = methods[name](owner, *arguments, **keywords)
            bounded(owner)
            return result
        if name in ("strip", "lstrip", "rstrip") and not arguments:
            return owner.stripped(left=name != "rstrip", right=name != "lstrip")
        if name == "join" and isinstance(arguments[0], list):
            texts = [to_text(member, lines) for member in arguments[0]]
            return joined(part for number, text in enumerate(texts) for part in ([owner] if number else []) + [text])
        if name not in TEXT_METHODS:
            raise Unreadable(f"{name}() of a text is not read")
        text, values = plain(owner), [plain(argument) for argument in arguments]
        if name == "replace" and len(text) + text.count(values[0]) * len(values[1]) > MAX_TEXT:
            raise Unreadable(TOO_LONG)
        return lifted(getattr(text, name)(*values), lines)
