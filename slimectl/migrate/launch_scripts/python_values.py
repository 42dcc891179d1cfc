"""Values of a Python file that is followed: texts with the lines they come from, and unknown values."""

from __future__ import annotations

import ast
import operator
import posixpath
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from slimectl.migrate.launch_scripts.shell_values import MAX_TEXT

MAX_MEMBERS = 10_000
"""Maximum number of members of a list, including nested ones. A program that is followed has fewer."""
TOO_LONG = "it is too long"


@dataclass(frozen=True)
class Unknown:
    """A value that cannot be determined from the file: its source, and the reason."""

    source: str
    reason: str


@dataclass(frozen=True)
class Piece:
    """A part of a text, with the first and last line of its source. `unknown` is the reason if it is unknown."""

    text: str
    lines: tuple[int, int]
    unknown: str = ""


@dataclass(frozen=True)
class Text:
    """A string as pieces in order."""

    pieces: tuple[Piece, ...] = ()

    def __str__(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def unknown(self) -> str:
        return next((piece.unknown for piece in self.pieces if piece.unknown), "")

    def stripped(self, left: bool = True, right: bool = True) -> Text:
        """The text without blanks at its ends. Every other piece keeps its lines."""
        pieces = list(self.pieces)
        for position, strip in ((0, str.lstrip),) * left + ((-1, str.rstrip),) * right:
            while pieces and not pieces[position].unknown:
                piece = pieces.pop(position)
                if text := strip(piece.text):
                    pieces.insert(len(pieces) if position else 0, replace(piece, text=text))
                    break
        return Text(tuple(pieces))


@dataclass(frozen=True)
class Reference:
    """A name that the file does not define, with its attributes: `os.environ`, `U.execute_train`."""

    name: str


@dataclass
class Instance:
    """An object with attributes, of a class of the file or returned by a call of the library `name`."""

    kind: ast.ClassDef | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True)
class Function:
    """A function of the file, the object that it is bound to, and the names of the enclosing function.

    `node` is a name if it is an attribute of a library object.
    """

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | str
    owner: Instance | None = None
    scope: dict[str, Any] = field(default_factory=dict, compare=False)


class Unreadable(Exception):
    """An expression whose value is unknown. The message is the reason."""


def joined(texts: Iterable[Text]) -> Text:
    """Join several texts. Raises Unreadable if the result is too long."""
    text = Text(tuple(piece for part in texts for piece in part.pieces))
    if len(text.pieces) > MAX_MEMBERS or sum(len(piece.text) for piece in text.pieces) > MAX_TEXT:
        raise Unreadable(TOO_LONG)
    return text


def bounded(members: list[Any]) -> list[Any]:
    """The list. Raises Unreadable if it is too long."""
    if len(members) > MAX_MEMBERS:
        raise Unreadable(TOO_LONG)
    return members


def to_text(value: Any, lines: tuple[int, int]) -> Text:
    """The text of a value in an f-string."""
    if isinstance(value, Text):
        return value
    if isinstance(value, Unknown):
        return Text((Piece("".join(value.source.split()), lines, value.reason),))
    if isinstance(value, Instance | Function | Reference):
        raise Unreadable("it is an object")
    return Text((Piece(str(plain(value)), lines),))


def plain(value: Any, members: Iterator[int] | None = None) -> Any:
    """The Python value of a known value. Raises Unreadable for anything else, and for more than MAX_MEMBERS members."""
    members = members or count()
    if next(members) > MAX_MEMBERS:
        raise Unreadable(TOO_LONG)
    if isinstance(value, Text) and not value.unknown:
        return str(value)
    if isinstance(value, Text | Unknown):
        raise Unreadable(value.unknown if isinstance(value, Text) else value.reason)
    if isinstance(value, list | tuple):
        return [plain(member, members) for member in value]
    if isinstance(value, dict):
        return {plain(key, members): plain(member, members) for key, member in value.items()}
    if isinstance(value, Instance | Function | Reference | ast.AST):
        raise Unreadable("it is an object")
    return value


def lifted(value: Any, lines: tuple[int, int]) -> Any:
    """A Python value in the interpreter's form: strings as texts."""
    if isinstance(value, str):
        return Text((Piece(value, lines),))
    if isinstance(value, list | tuple):
        return [lifted(member, lines) for member in value]
    if isinstance(value, dict):
        return {key: lifted(member, lines) for key, member in value.items()}
    return value


def truth(value: Any) -> bool | None:
    """Whether a value counts as true, or None if that is unknown."""
    if isinstance(value, Text):
        is_filled = any(piece.text and not piece.unknown for piece in value.pieces)
        return True if is_filled else None if value.unknown else False
    if isinstance(value, Unknown | Reference) or (isinstance(value, Function) and isinstance(value.node, str)):
        return None
    return True if isinstance(value, Instance | Function) else bool(value)


def copied(value: list[Any] | dict[Any, Any] | Instance) -> Any:
    """A copy of a list, a table or an object. Its contents are not copied."""
    return replace(value, attributes=dict(value.attributes)) if isinstance(value, Instance) else value.copy()


def changeable(values: Iterable[Any]) -> list[Any]:
    """The lists, tables and objects among values, and inside them."""
    waiting, members = list(values), dict[int, Any]()
    while waiting and len(members) < MAX_MEMBERS:
        value = waiting.pop()
        if isinstance(value, list | dict | Instance) and id(value) not in members:
            members[id(value)] = value
            inner = value.attributes if isinstance(value, Instance) else value
            waiting += inner.values() if isinstance(inner, dict) else inner
    return list(members.values())


def restore(target: Any, content: Any) -> None:
    """Give a list, a table or an object the contents of another of the same kind."""
    if isinstance(target, list):
        target[:] = content
    elif isinstance(target, dict):
        target.clear()
        target.update(content)
    else:
        target.attributes = content.attributes


def merged(values: Sequence[Any], reason: str) -> Any:
    """A value after branches, if it is unknown which one is taken: the shared part, and the rest as unknown."""
    first = values[0]
    if all(value == first for value in values):
        return first
    if all(isinstance(value, list) for value in values):
        return _members(values, lambda member: merged([member, None], reason))
    if all(isinstance(value, dict) for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: merged([value.get(key) for value in values], reason) for key in keys}
    if all(isinstance(value, Instance) for value in values):
        return replace(first, attributes=merged([value.attributes for value in values], reason))
    if all(isinstance(value, Text | type(None)) for value in values):
        pieces = [value.pieces if value else () for value in values]
        return Text(tuple(_members(pieces, lambda piece: replace(piece, unknown=reason))))
    shown = [
        value.source if isinstance(value, Unknown) else str(value)
        for value in values if not isinstance(value, Instance | Function)
    ]  # fmt: skip
    return Unknown(" or ".join(dict.fromkeys(shown)) or "…", reason)


def _members(branches: Sequence[Sequence[Any]], uncertain: Callable[[Any], Any]) -> list[Any]:
    """The members that all branches begin with, then the members of each branch, made uncertain."""
    shared = 0
    shortest = min(map(len, branches))
    while shared < shortest and all(branch[shared] == branches[0][shared] for branch in branches):
        shared += 1
    tails = [uncertain(member) for branch in branches for member in branch[shared:]]
    return [*branches[0][:shared], *tails]


def calculated(first: Any, operation: ast.operator, second: Any) -> Any:
    """The result of an operator. Raises Unreadable if it is unknown or not supported."""
    is_sum = isinstance(operation, ast.Add)
    if is_sum and Text in (type(first), type(second)) and all(isinstance(x, Text | Unknown) for x in (first, second)):
        pieces = (first if isinstance(first, Text) else second).pieces
        lines = pieces[0].lines if pieces else (1, 1)
        return joined([to_text(first, lines), to_text(second, lines)])
    if is_sum and isinstance(first, list) and isinstance(second, list):
        return bounded([*first, *second])
    if isinstance(operation, ast.BitOr) and isinstance(first, dict) and isinstance(second, dict):
        return first | second
    if isinstance(operation, ast.Div) and isinstance(first, Text):  # of pathlib
        return lifted(posixpath.join(plain(first), plain(second)), first.pieces[0].lines)
    numbers = plain(first), plain(second)
    is_readable = type(operation) in OPERATORS and (not isinstance(operation, ast.Pow) or abs(numbers[1]) <= 64)
    if not is_readable or not all(isinstance(number, int | float) and abs(number) < 1e18 for number in numbers):
        raise Unreadable("this operator is not read")
    return OPERATORS[type(operation)](*numbers)


OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda member, members: member in members, ast.NotIn: lambda member, members: member not in members,
}  # fmt: skip
TEXT_METHODS = (
    "split", "splitlines", "replace", "lower", "upper", "startswith", "endswith", "removesuffix", "removeprefix",
    "partition", "rpartition", "rsplit", "title", "count", "isdigit",
)  # fmt: skip
LIST_METHODS: dict[str, Callable[..., Any]] = {
    "append": list.append, "copy": list.copy, "clear": list.clear, "reverse": list.reverse,
    "extend": lambda owner, members: owner.extend(members if isinstance(members, list) else [members]),
    "insert": lambda owner, index, member: owner.insert(plain(index), member),
    "pop": lambda owner, index=-1: owner.pop(plain(index)),
    "remove": lambda owner, member: owner.pop([plain(item) for item in owner].index(plain(member))),
}  # fmt: skip
TABLE_METHODS: dict[str, Callable[..., Any]] = {
    "get": lambda owner, key, default=None: owner.get(plain(key), default),
    "pop": lambda owner, key, default=None: owner.pop(plain(key), default),
    "setdefault": lambda owner, key, default=None: owner.setdefault(plain(key), default),
    "copy": dict.copy, "values": lambda owner: list(owner.values()), "keys": lambda owner: lifted(list(owner), (1, 1)),
    "items": lambda owner: [[lifted(key, (1, 1)), value] for key, value in owner.items()],
    "update": lambda owner, table=(), **members: owner.update(spread(table) | members),
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "bool": bool, "len": len, "min": min, "max": max, "abs": abs, "round": round,
    "sorted": sorted, "list": list, "tuple": list, "sum": sum, "any": any, "all": all, "str": str,
    "range": lambda *ends: list(range(*ends)[:MAX_MEMBERS]),
    "enumerate": lambda members: list(enumerate(members)), "zip": lambda *members: list(zip(*members, strict=False)),
    "shlex.quote": shlex.quote, "shlex.split": shlex.split, "shlex.join": shlex.join,
    "os.path.join": posixpath.join, "os.path.basename": posixpath.basename, "os.path.dirname": posixpath.dirname,
    "os.path.normpath": posixpath.normpath, "Path": posixpath.join, "pathlib.Path": posixpath.join,
}  # fmt: skip
"""Functions whose result depends only on their arguments."""


def spread(table: Any) -> dict[Any, Any]:
    """The members of `**table`, or a single member `**` if the table is unknown."""
    return dict(table) if isinstance(table, dict | tuple) else {"**": table}
