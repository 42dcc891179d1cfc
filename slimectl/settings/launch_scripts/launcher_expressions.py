"""Evaluates expressions of a Python launcher by their syntax: texts with their lines, tables, calls that are known."""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slimectl.settings.launch_scripts.launcher_values import (
    COMPARISONS,
    FUNCTIONS,
    MAX_MEMBERS,
    TEXT_METHODS,
    Function,
    Instance,
    Leave,
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
    to_text,
    truth,
)  # fmt: skip
from slimectl.settings.launch_scripts.shell_values import MAX_TEXT
from slimectl.settings.launch_scripts.shell_variables import is_secret_variable

MAX_STEPS = 30_000
SPEC = re.compile(r"[<>^]?[-+ ]?0?\d{0,3},?(?:\.\d{1,2})?[bdeEfFgGnosxX%]?")
"""Format specifications of a width that a launcher has."""
READABLE = (Unreadable, ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)
"""What evaluating an expression raises where its value is not known."""


class Expressions(ABC):
    """The names of a program, and the values of its expressions."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._globals: dict[str, Any] = {"__name__": lifted("__main__", (1, 1))}
        self._frames: list[dict[str, Any]] = []
        self._steps = 0

    @abstractmethod
    def call_reference(self, name: str, call: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a function that the file does not define. Raises Unreadable if it is not known."""

    @abstractmethod
    def call_object(self, owner: Instance, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a method of an object without a class here; of a call of it for an empty name."""

    @abstractmethod
    def follow(self, function: Function, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Follow a function of the file; return what it returns."""

    @abstractmethod
    def instance(self, kind: ast.ClassDef, arguments: list[Any], keywords: dict[str, Any]) -> Instance:
        """An object of a class of the file."""

    @abstractmethod
    def store(self, target: ast.expr, value: Any) -> None:
        """Set a name, an attribute or an element."""

    @abstractmethod
    def members_of(self, kind: ast.ClassDef | None) -> list[ast.stmt]:
        """The members of a class, then those of its bases."""

    def _count(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise Leave("limit")

    def value(self, node: ast.expr) -> Any:
        """The value of an expression; an Unknown with its source where the file does not tell it."""
        self._count()
        try:
            return self._evaluated(node)
        except READABLE as error:
            source = " ".join(ast.unparse(node).split())
            reason = str(error) if isinstance(error, Unreadable) and str(error) else ""
            return Unknown(source, reason or f"{source[:60]} is known when the program runs")

    def _evaluated(self, node: ast.expr) -> Any:
        lines = (node.lineno, node.end_lineno or node.lineno)
        match node:
            case ast.Constant(value=constant):
                return lifted(constant, lines)
            case ast.Name(id=name):
                return self._named(name)
            case ast.JoinedStr(values=parts):
                return joined(self._formatted(part, lines) for part in parts)
            case ast.List(elts=members) | ast.Tuple(elts=members) | ast.Set(elts=members):
                return bounded(list(self._spread(members)))
            case ast.Dict(keys=keys, values=members):
                return self._table(keys, members)
            case ast.BinOp(left=left, op=operator, right=right):
                return calculated(self.value(left), operator, self.value(right))
            case ast.BoolOp():
                return self._either(node)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                result = truth(self.value(operand))
                if result is None:
                    raise Unreadable
                return not result
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -plain(self.value(operand))
            case ast.Compare():
                return self._compared(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._chosen(test, body, orelse)
            case ast.NamedExpr(target=target, value=value):
                result = self.value(value)
                self.store(target, result)
                return result
            case ast.ListComp(elt=element, generators=loops) | ast.GeneratorExp(elt=element, generators=loops):
                return [self.value(element) for _ in self._comprehended(loops)]
            case ast.DictComp(key=key, value=value, generators=loops):
                return {plain(self.value(key)): self.value(value) for _ in self._comprehended(loops)}
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(self.value(owner), name)
            case ast.Subscript(value=owner, slice=index):
                return self._element(self.value(owner), index, lines)
            case ast.Call():
                return self._called(node)
            case ast.Lambda():
                return Function(node)
        raise Unreadable

    def _named(self, name: str) -> Any:
        for names in ([self._frames[-1]] if self._frames else []) + [self._globals]:
            if name in names:
                return names[name]
        return Reference(name)

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
            if not isinstance(member, ast.Starred):
                yield self.value(member)
                continue
            values = self.value(member.value)
            if not isinstance(values, list):
                raise Unreadable(f"{ast.unparse(member)} is known when the program runs")
            yield from values

    def _table(self, keys: Sequence[ast.expr | None], members: Sequence[ast.expr]) -> dict[Any, Any]:
        table: dict[Any, Any] = {}
        for key, member in zip(keys, members, strict=True):
            value = self.value(member)
            if key is not None:
                table[plain(self.value(key))] = value
            elif isinstance(value, dict):
                table |= value
            else:
                raise Unreadable
        return table

    def _either(self, node: ast.BoolOp) -> Any:
        is_or, value = isinstance(node.op, ast.Or), None
        for operand in node.values:
            value = self.value(operand)
            result = truth(value)
            if result is None:
                raise Unreadable
            if result == is_or:
                return value
        return value

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

    def _chosen(self, test: ast.expr, body: ast.expr, orelse: ast.expr) -> Any:
        condition = truth(self.value(test))
        if condition is None:
            reason = f"it depends on a condition that is not evaluated (line {test.lineno})"
            return merged([self.value(body), self.value(orelse)], reason)
        return self.value(body if condition else orelse)

    def _comprehended(self, loops: Sequence[ast.comprehension]) -> Iterator[None]:
        """Set the variables of a comprehension in turn."""
        if not loops:
            yield
            return
        members = self.value(loops[0].iter)
        if not isinstance(members, list | dict):
            raise Unreadable
        for member in list(members)[:MAX_MEMBERS]:
            self._count()
            self.store(loops[0].target, member)
            conditions = [truth(self.value(test)) for test in loops[0].ifs]
            if None in conditions:
                raise Unreadable
            if all(conditions):
                yield from self._comprehended(loops[1:])

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Instance):
            if name in owner.attributes:
                return owner.attributes[name]
            method = next((node for node in self.members_of(owner.kind) if getattr(node, "name", "") == name), None)
            if not isinstance(method, ast.FunctionDef):
                raise Unreadable
            is_property = any(ast.unparse(item) in ("property", "cached_property") for item in method.decorator_list)
            function = Function(method, owner)
            return self.follow(function, [], {}) if is_property else function
        if isinstance(owner, Reference):
            return Reference(f"{owner.name}.{name}")
        raise Unreadable(owner.reason if isinstance(owner, Unknown) else "")

    def _element(self, owner: Any, index: ast.expr, lines: tuple[int, int]) -> Any:
        if isinstance(owner, Reference) and owner.name in ("os.environ", "environ"):
            return lifted(self.variable(plain(self.value(index)), None), lines)
        if isinstance(index, ast.Slice):
            ends = [plain(self.value(end)) if end else None for end in (index.lower, index.upper, index.step)]
            return lifted(plain(owner)[slice(*ends)], lines)
        key = plain(self.value(index))
        return owner[key] if isinstance(owner, dict | list) else lifted(plain(owner)[key], lines)

    def variable(self, name: str, default: Any) -> Any:
        """A variable of the environment. Raises Unreadable if it is not set and has no default."""
        if name in self._environ:
            return f"env:{name}" if is_secret_variable(name) else self._environ[name]
        if default is None:
            raise Unreadable(f"{name} is not set in the environment")
        return default

    def _called(self, call: ast.Call) -> Any:
        if isinstance(call.func, ast.Attribute):
            owner = self.value(call.func.value)
            if isinstance(owner, Text | list | dict):
                return self._method(owner, call.func.attr, call)
            if isinstance(owner, Instance) and owner.kind is None:
                return self.call_object(owner, call.func.attr, list(self._spread(call.args)), self._keywords(call))
            function = self._attribute(owner, call.func.attr)
        else:
            function = self.value(call.func)
        arguments, keywords = list(self._spread(call.args)), self._keywords(call)
        if isinstance(function, Function):
            return self.follow(function, arguments, keywords)
        if isinstance(function, ast.ClassDef):
            return self.instance(function, arguments, keywords)
        if isinstance(function, Instance) and function.kind is None:
            return self.call_object(function, "", arguments, keywords)
        if isinstance(function, Reference):
            return self._built_in(function.name, call, arguments, keywords)
        raise Unreadable

    def _keywords(self, call: ast.Call) -> dict[str, Any]:
        keywords: dict[str, Any] = {}
        for keyword in call.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif isinstance(value, dict):
                keywords |= {str(plain(name)): member for name, member in value.items()}
        return keywords

    def _built_in(self, name: str, call: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        lines = (call.lineno, call.end_lineno or call.lineno)
        short = name.removeprefix("pathlib.")
        if name in ("os.environ.get", "os.getenv", "environ.get", "getenv"):
            default = arguments[1] if len(arguments) > 1 else keywords.get("default")
            return lifted(self.variable(plain(arguments[0]), default), lines)
        if name == "str" and len(arguments) == 1:
            return to_text(arguments[0], lines)
        if name == "Path" and arguments and isinstance(arguments[0], Text) and len(arguments) == 1:
            return arguments[0]
        if short in FUNCTIONS and not keywords:
            return lifted(FUNCTIONS[short](*map(plain, arguments)), lines)
        if name == "dict":
            return {**(arguments[0] if arguments else {}), **keywords}
        if name in ("sys.exit", "exit", "quit"):
            raise Leave("exit")
        return self.call_reference(name, call, arguments, keywords)

    def _method(self, owner: Any, name: str, call: ast.Call) -> Any:
        arguments, lines = list(self._spread(call.args)), (call.lineno, call.end_lineno or call.lineno)
        if isinstance(owner, list):
            return self._change_list(owner, name, arguments)
        if isinstance(owner, dict):
            return self._change_table(owner, name, arguments, self._keywords(call))
        if name in ("strip", "lstrip", "rstrip") and not arguments:
            return owner.stripped(left=name != "rstrip", right=name != "lstrip")
        if name == "join" and isinstance(arguments[0], list):
            texts = [to_text(member, lines) for member in arguments[0]]
            return joined(part for number, text in enumerate(texts) for part in ([owner] if number else []) + [text])
        if name not in TEXT_METHODS:
            raise Unreadable(f"{name}() of a text is not read")
        text, values = plain(owner), [plain(argument) for argument in arguments]
        if name == "replace" and len(text) + text.count(values[0]) * len(values[1]) > MAX_TEXT:
            raise Unreadable("it is too long")
        return lifted(getattr(text, name)(*values), lines)

    def _change_list(self, owner: list[Any], name: str, arguments: list[Any]) -> Any:
        changes: dict[str, Callable[[], Any]] = {
            "append": lambda: owner.append(arguments[0]),
            "extend": lambda: owner.extend(arguments[0] if isinstance(arguments[0], list) else arguments),
            "insert": lambda: owner.insert(plain(arguments[0]), arguments[1]),
            "copy": lambda: list(owner),
        }
        if name not in changes:
            raise Unreadable(f"{name}() of a list is not read")
        result = changes[name]()
        bounded(owner)
        return result

    def _change_table(self, owner: dict[Any, Any], name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        key = plain(arguments[0]) if arguments and not isinstance(arguments[0], dict) else None
        default = arguments[1] if len(arguments) > 1 else None
        reads: dict[str, Callable[[], Any]] = {
            "get": lambda: owner.get(key, default), "pop": lambda: owner.pop(key, default),
            "setdefault": lambda: owner.setdefault(key, default), "copy": lambda: dict(owner),
            "keys": lambda: [lifted(item, (1, 1)) for item in owner], "values": lambda: list(owner.values()),
            "items": lambda: [[lifted(item, (1, 1)), value] for item, value in owner.items()],
            "update": lambda: owner.update(arguments[0] if arguments else keywords),
        }  # fmt: skip
        if name not in reads:
            raise Unreadable(f"{name}() of a table is not read")
        return reads[name]()
