"""Parses a pickle into a tree of plain data. Nothing is imported, looked up or called.

Python's unpickler resolves names and calls them, but a checkpoint may be untrusted. Here a name stays a name
(Reference) and a call stays a description (Construction). Both are accepted only if the exact pair of module and name
is on the caller's list. Instructions that do not occur in real checkpoints are rejected.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

MAX_OPCODES = 20_000_000
"""Twice the count of a model with 120 000 expert tensors and their moments. This needs at most 2 GB of memory."""
MAX_KEY = 2**31
"""Larger numbers could be chosen so that they collide as keys."""


class UnsafePickleError(ValueError):
    """Raised for a pickle that does not come from a real checkpoint."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A global name in the file, which is never resolved."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Construction:
    """Description of an object in the file: the name of the callable, its arguments and the state."""

    reference: Reference
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """Persistent id of data outside the pickle: a tensor's storage."""

    name: Any


def parse_pickle(
    data: bytes, *, allowed: Collection[tuple[str, str]], placeholders: Collection[str] = (), persistent: bool = False
) -> Any:
    """Parse a pickle into a tree. Raises UnsafePickleError.

    `allowed` are the pairs (module, name) that may occur, in addition to any name of the packages in `placeholders`,
    whose objects are not read. `persistent` allows persistent ids.
    """
    machine = _Machine(allowed, placeholders, persistent)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count >= MAX_OPCODES:
                raise UnsafePickleError(f"more than {MAX_OPCODES} instructions")
            machine.execute(opcode.name, argument)
        return machine.result()
    except UnsafePickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, struct.error, OverflowError) as error:
        raise UnsafePickleError(f"a damaged pickle: {error}") from error


class _Machine:
    """Stack machine that executes a pickle."""

    def __init__(self, allowed: Collection[tuple[str, str]], placeholders: Collection[str], persistent: bool) -> None:
        self._allowed, self._placeholders, self._persistent = allowed, placeholders, persistent
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def execute(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            self._stack.append(argument)
        elif name in _EMPTY:
            self._stack.append(_EMPTY[name]())
        elif name in _OPERATIONS:
            _OPERATIONS[name](self, argument)
        elif name not in _FRAMING:
            raise UnsafePickleError(f"the instruction {name} does not occur in checkpoints")

    def result(self) -> Any:
        if len(self._stack) != 1 or self._marked:
            raise UnsafePickleError("a damaged pickle: it does not end with one object")
        return self._stack[0]

    def mark(self, _: Any) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _pop_to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def tuple_since_mark(self, _: Any) -> None:
        items = self._pop_to_mark()
        self._stack.append(tuple(items))

    def put_tuple(self, length: int) -> None:
        items = tuple(self._stack[-length:])
        if len(items) != length:
            raise UnsafePickleError("a damaged pickle: its stack is too short")
        self._stack[-length:] = [items]

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def append(self, _: Any) -> None:
        value = self._stack.pop()
        _elements(self._stack[-1]).append(value)

    def appends(self, _: Any) -> None:
        values = self._pop_to_mark()
        _elements(self._stack[-1]).extend(values)

    def set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        _items(self._stack[-1])[_check_key(key)] = value

    def set_items(self, _: Any) -> None:
        values = self._pop_to_mark()
        target = _items(self._stack[-1])
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[_check_key(key)] = value

    def name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._push_reference(module, name)

    def name_from_stack(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise UnsafePickleError("a name that is not a string")
        self._push_reference(module, name)

    def _push_reference(self, module: str, name: str) -> None:
        if (module, name) not in self._allowed and module.partition(".")[0] not in self._placeholders:
            raise UnsafePickleError(f"{module}.{name}"[:120] + " is not allowed in a checkpoint")
        self._stack.append(Reference(module, name))

    def construct(self, _: Any) -> None:
        arguments, reference = self._stack.pop(), self._stack.pop()
        if not isinstance(reference, Reference) or not isinstance(arguments, tuple):
            raise UnsafePickleError("a call of something that is not a name")
        self._stack.append(Construction(reference, arguments))

    def build(self, _: Any) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if not isinstance(target, Construction) or target.state is not None:
            raise UnsafePickleError("a state for something that has none")
        target.state = state

    def refer_beside(self, _: Any) -> None:
        if not self._persistent:
            raise UnsafePickleError("the instruction BINPERSID does not occur in such files")
        self._stack.append(Persistent(self._stack.pop()))


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
     "SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
)  # fmt: skip
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
_FRAMING = frozenset(("PROTO", "FRAME", "STOP"))
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "TUPLE": _Machine.tuple_since_mark,
    "TUPLE1": lambda machine, _: machine.put_tuple(1),
    "TUPLE2": lambda machine, _: machine.put_tuple(2),
    "TUPLE3": lambda machine, _: machine.put_tuple(3),
    "MEMOIZE": _Machine.memoize,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_from_stack,
    "REDUCE": _Machine.construct,
    "NEWOBJ": _Machine.construct,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.refer_beside,
}


def _elements(target: Any) -> list[Any]:
    if isinstance(target, list):
        return target
    if isinstance(target, Construction):
        return target.elements
    raise UnsafePickleError("elements for something that is not a list")


def _items(target: Any) -> dict[Any, Any]:
    if isinstance(target, dict):
        return target
    if isinstance(target, Construction):
        return target.items
    raise UnsafePickleError("items for something that is not a dictionary")


def _check_key(key: Any) -> Any:
    """Return the key. Raises UnsafePickleError if it could be chosen to collide with many others."""
    if isinstance(key, str | Construction) or (isinstance(key, int) and abs(key) < MAX_KEY):
        return key
    raise UnsafePickleError("a key that is neither a string nor a small number")
