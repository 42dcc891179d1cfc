"""Unpickles into a tree of plain data. Nothing is imported, looked up or called.

A checkpoint may be untrusted, and Python's unpickler imports what a pickle names and calls it. Here each name must be
on the caller's list. It becomes an empty class that keeps the arguments and the state of its objects (Construction).
Instructions that do not occur in real checkpoints are rejected. Some of them would bypass `find_class`.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

MAX_KEY = 2**31
"""Larger numbers could be chosen so that they collide as keys."""


class UnsafePickleError(ValueError):
    """Raised for a pickle that does not come from a real checkpoint."""


class Reference(NamedTuple):
    """A global name in the file, which is never resolved."""

    module: str
    name: str


class Construction:
    """An object in the file: the name of its class or function, its arguments and its state."""

    reference: ClassVar[Reference]
    arguments: tuple[Any, ...]
    state: Any
    items: dict[Any, Any]

    def __new__(cls, *arguments: Any) -> Construction:
        self = object.__new__(cls)
        self.arguments, self.state, self.items = arguments, None, {}
        return self

    def __setstate__(self, state: Any) -> None:
        if self.state is not None:
            raise UnsafePickleError("a state for something that has one")
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """Persistent id of data outside the pickle: a tensor's storage."""

    name: Any


def reference_of(value: Any) -> Reference | None:
    """Return the name that a value of the tree is. None for any other value."""
    return value.reference if isinstance(value, type) and issubclass(value, Construction) else None


def parse_pickle(
    data: bytes, *, allowed: Collection[tuple[str, str]], placeholders: Collection[str] = (), persistent: bool = False
) -> Any:
    """Parse a pickle into a tree. Raises UnsafePickleError.

    `allowed` are the pairs (module, name) that may occur, in addition to any name of the packages in `placeholders`,
    whose objects are not read. `persistent` allows persistent ids.
    """
    try:
        return _Unpickler(data, allowed, placeholders, persistent).load()
    except UnsafePickleError:
        raise
    except (*_DAMAGE, pickle.UnpicklingError) as error:
        raise UnsafePickleError(f"a damaged pickle: {error}") from error


_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, EOFError, struct.error)


class _Instructions(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Callable[[Any], None]:
        opcode = pickletools.code2op.get(chr(code))  # type: ignore[attr-defined]
        raise UnsafePickleError(f"the instruction {opcode.name if opcode else code} does not occur in checkpoints")


_INSTRUCTIONS = (
    "APPEND", "APPENDS", "BINBYTES", "BINBYTES8", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPERSID",
    "BINPUT", "BINUNICODE", "BINUNICODE8", "BUILD", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "GLOBAL",
    "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE", "NEWOBJ", "NEWTRUE", "NONE", "PROTO",
    "REDUCE", "SETITEM", "SETITEMS", "SHORT_BINBYTES", "SHORT_BINUNICODE", "STACK_GLOBAL", "STOP", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3",
)  # fmt: skip


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python, because its table of instructions can be cut down."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = _Instructions(
        {code: pickle._Unpickler.dispatch[code] for code in (ord(getattr(pickle, name)) for name in _INSTRUCTIONS)}
    )

    def __init__(
        self, data: bytes, allowed: Collection[tuple[str, str]], placeholders: Collection[str], persistent: bool
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed, self._placeholders, self._persistent = allowed, placeholders, persistent
        self._classes: dict[Reference, type[Construction]] = {}

    def find_class(self, module: str, name: str) -> type[Construction]:
        reference = Reference(module, name)
        if reference not in self._allowed and module.partition(".")[0] not in self._placeholders:
            raise UnsafePickleError(f"{module}.{name}"[:120] + " is not allowed in a checkpoint")
        if reference not in self._classes:
            self._classes[reference] = type("Construction", (Construction,), {"reference": reference})
        return self._classes[reference]

    def persistent_load(self, pid: Any) -> Persistent:
        if not self._persistent:
            raise UnsafePickleError("the instruction BINPERSID does not occur in such files")
        return Persistent(pid)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_check_key(key)] = value

    def load_setitems(self) -> None:
        values = self.pop_mark()
        for key, value in zip(values[::2], values[1::2], strict=True):
            self.stack[-1][_check_key(key)] = value

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


def _check_key(key: Any) -> Any:
    """Return the key. Raises UnsafePickleError if it could be chosen to collide with many others."""
    if isinstance(key, str | Construction) or (isinstance(key, int) and abs(key) < MAX_KEY):
        return key
    raise UnsafePickleError("a key that is neither a string nor a small number")
