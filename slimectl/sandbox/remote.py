"""Proxies in a test for values of the program that are not plain data.

The program provides their attributes, methods, items, and operators between two of them. It never compares an object
with plain data, because it would learn the expected value, and could claim equality. For that comparison an object is
converted to plain data, for example if its class derives from list. Otherwise it is unequal.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class ProgramChannel(Protocol):
    """Sends operations to the process of the program (judge.Judge)."""

    note: str

    def ask(self, operation: str, *arguments: Any, keywords: dict[str, Any] | None = None) -> Any:
        """Perform the operation on the program's objects and return its result."""
        ...


class RemoteObject:
    """An object of the program."""

    def __init__(self, judge: ProgramChannel, number: int, type_name: str) -> None:
        object.__setattr__(self, "_judge", judge)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_type_name", str(type_name)[:60])

    def _ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        return object.__getattribute__(self, "_judge").ask(operation, self, *arguments, keywords=keywords)

    def _plain(self) -> Any:
        """Return the object as plain data, or NotImplemented if it is not plain data, which the judge notes."""
        try:
            return self._ask("plain")
        except TypeError:
            judge = object.__getattribute__(self, "_judge")
            judge.note = f"{object.__getattribute__(self, '_type_name')} of the program is not plain data"
            return NotImplemented

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __delattr__(self, name: str) -> None:
        self._ask("delattr", name)

    def __contains__(self, item: Any) -> bool:
        return item in self._ask("contents")

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = self._ask("iter")
        return iterator

    def __round__(self, digits: int | None = None) -> Any:
        return self._ask("round", digits)

    def __enter__(self) -> Any:
        return self._ask("enter")

    def __exit__(self, *error: object) -> None:
        self._ask("exit")


class RemoteFunction(RemoteObject):
    """A function, a bound method or another callable of the program."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return object.__getattribute__(self, "_judge").ask("call", self, *arguments, keywords=keywords)


class RemoteClass(RemoteFunction):
    """A class of the program."""

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, RemoteObject) and bool(self._ask_of("isinstance", instance))

    def __subclasscheck__(self, subclass: Any) -> bool:
        return isinstance(subclass, RemoteObject) and bool(self._ask_of("issubclass", subclass))

    def _ask_of(self, operation: str, other: Any) -> Any:
        return object.__getattribute__(self, "_judge").ask(operation, other, self)


def _unary(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._ask(name, *arguments)


def _binary(name: str, local: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Make a binary operator. The program applies it to two of its objects. With plain data it is applied locally."""

    def operate(self: Any, other: Any) -> Any:
        if isinstance(other, RemoteObject):
            return self._ask(name, other)
        plain = self._plain()
        return NotImplemented if plain is NotImplemented else local(plain, other)

    return operate


def _reflected(local: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def operate(self: Any, other: Any) -> Any:
        plain = self._plain()
        return NotImplemented if plain is NotImplemented else local(other, plain)

    return operate


UNARY = ("len", "next", "reversed", "bool", "str", "repr", "format", "hash", "int", "float", "complex", "index",
         "neg", "pos", "abs", "invert", "getitem", "setitem", "delitem")  # fmt: skip
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)

for _name in UNARY:
    setattr(RemoteObject, f"__{_name}__", _unary(_name))
for _name in (*COMPARISONS, *ARITHMETIC):
    _local = getattr(operator, _name + "_" if _name in ("and", "or") else _name)
    setattr(RemoteObject, f"__{_name}__", _binary(_name, _local))
    if _name in ARITHMETIC:
        setattr(RemoteObject, f"__r{_name}__", _reflected(_local))
