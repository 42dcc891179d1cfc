"""Server side of a program under test: executes the judge's requests on values of the program."""

from __future__ import annotations

import io
import operator
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from slimectl.sandbox.peer import BrokenChannelError, Peer
from slimectl.sandbox.wire import CannotCrossError

PLAIN: tuple[Any, ...] = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
MAX_ITEMS = 1_000_000


def serve(fd: int, main: ModuleType) -> None:
    """Answer the judge until it has ended."""
    ProgramServer(fd, main).serve()


class ProgramServer(Peer):
    """Executes the judge's requests on values of the program."""

    def __init__(self, fd: int, main: ModuleType) -> None:
        super().__init__(fd)
        self._main = main
        self._output = io.StringIO()

    def serve(self) -> None:
        """Answer requests until the judge kills this process. The program's output goes to the judge."""
        sys.stdout = self._output
        self._send({"ready": True})
        while True:
            try:
                message = self.receive()
            except BrokenChannelError:  # the judge has its verdict
                return
            self.answer(message)

    def printed(self) -> str:
        text = self._output.getvalue()
        self._output.seek(0)
        self._output.truncate()
        return text

    def kind_of(self, value: Any) -> list[Any]:
        name = type(value).__name__
        if isinstance(value, type):
            names = [kind.__name__ for kind in value.__mro__]
            return ["exception" if issubclass(value, BaseException) else "class", names, value.__module__]
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if hasattr(value, "cr_code"):
            return ["coroutine", name]
        if isinstance(value, Iterator):
            return ["iterator", name]
        return ["callable" if callable(value) else "object", name]

    def number_of(self, value: Any) -> int | None:
        return value._number if isinstance(value, TestObject) else None

    def reference(self, number: int, kind: list[Any]) -> Any:
        if kind[0] == "iterator":
            return remote_iterator(self, TestObject(self, number))
        return TestFunction(self, number) if kind[0] == "callable" else TestObject(self, number)

    def perform(self, operation: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if operation == "global":
            return self._main.__dict__[arguments[0]]
        if operation == "call":
            return arguments[0](*arguments[1:], **keywords)
        return OPERATIONS[operation](*arguments)


def remote_iterator(peer: Peer, iterator: Any) -> Iterator[Any]:
    """Yield the items of an iterator of the other side, one request per item, so that it may be infinite."""
    while True:
        try:
            item = peer.ask("next", iterator)
        except StopIteration:
            return
        yield item


class TestObject:
    """An object of a class that the test defines. Its public attributes can be read and set."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)


class TestFunction(TestObject):
    """A function or a class of the test."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.ask("call", self, *arguments, keywords=keywords)


def plain_value(value: Any) -> Any:
    """Convert an object of a derived class to plain data. Raises TypeError for any other object."""
    for kind in PLAIN:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} is not plain data")


def run_coroutine(coroutine: Any) -> Any:
    """Run a coroutine to its result in a new event loop."""
    import asyncio

    return asyncio.run(coroutine)


def contents(value: Any) -> list[Any]:
    """Return the items of an iterable. Raises CannotCrossError for more than a million."""
    items = []
    for item in value:
        items.append(item)
        if len(items) > MAX_ITEMS:
            raise CannotCrossError("more than a million items cannot cross to the test")
    return items


OPERATIONS: dict[str, Any] = {
    "getattr": getattr, "setattr": setattr, "delattr": delattr,
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
    "len": len, "iter": iter, "next": next, "reversed": reversed, "contents": contents,
    "bool": bool, "str": str, "repr": repr, "format": format, "hash": hash,
    "int": int, "float": float, "complex": complex, "index": operator.index, "round": round,
    "neg": operator.neg, "pos": operator.pos, "abs": abs, "invert": operator.invert,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow, "matmul": operator.matmul,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "lshift": operator.lshift, "rshift": operator.rshift,
    "isinstance": isinstance, "issubclass": issubclass, "plain": plain_value, "run": run_coroutine,
    "enter": lambda value: value.__enter__(), "exit": lambda value: value.__exit__(None, None, None),
}  # fmt: skip
