"""Encodes the values that cross between a program and its judge: plain data as tagged JSON, anything else by number.

Null, booleans, strings, finite floats and 64-bit integers are written as they are. Everything else is a list that
begins with a tag: ["tuple", [1, 2]], ["list", 0, [1]], ["float", "nan"]. Mutable containers are numbered, so that one
object stays one object (["same", 0]) and changes to a call's arguments can be sent back. No value is executed.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_INT = 1 << 63
ATOMS = (bool, str, type(None))
TYPES = {kind.__name__: kind for kind in (
    bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, object, range, type(None),
)}  # fmt: skip
"""Types that are sent by name."""

DICTS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter,
                         "defaultdict": lambda items: defaultdict(None, items)}  # fmt: skip
VIEWS: dict[str, Any] = {"dict_keys": lambda items: dict.fromkeys(items).keys(),
                         "dict_values": lambda items: dict(enumerate(items)).values(),
                         "dict_items": lambda items: dict(items).items()}  # fmt: skip


class CannotCrossError(Exception):
    """A value that is not plain data and cannot be referred to."""


class Encoder:
    """Turns the values of one message into JSON. `refer` returns the form of a value that is not plain data."""

    def __init__(self, refer: Callable[[Any], list[Any]], containers: list[Any] | None = None) -> None:
        self.containers: list[Any] = list(containers or [])
        self._numbers = {id(container): number for number, container in enumerate(self.containers)}
        self._refer = refer

    def encode(self, value: Any) -> Any:
        """Return the form of a value. Raises CannotCrossError."""
        kind: Any = type(value)
        if kind in ATOMS:
            return value
        if kind is int:
            return value if -MAX_INT <= value < MAX_INT else ["int", hex(value)]
        if kind is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        if id(value) in self._numbers:
            return ["same", self._numbers[id(value)]]
        if kind in (list, set, bytearray, deque) or (kind.__name__ in DICTS and kind is _dict_type(kind.__name__)):
            number = len(self.containers)
            self.containers.append(value)
            self._numbers[id(value)] = number
            return [kind.__name__, number, *self.content(value)]
        return self._frozen(value)

    def content(self, value: Any) -> list[Any]:
        """Return the form of a mutable container's content."""
        if isinstance(value, bytearray):
            return [value.hex()]
        if isinstance(value, dict):
            return [[[self.encode(key), self.encode(item)] for key, item in value.items()]]
        return [self._items(value), value.maxlen] if isinstance(value, deque) else [self._items(value)]

    def _items(self, values: Any) -> list[Any]:
        items: list[Any] = list(values)
        kinds = set(map(type, items))
        if kinds <= {str, bool} or (kinds == {float} and all(map(math.isfinite, items))):
            return items
        return [self.encode(value) for value in items]

    def _frozen(self, value: Any) -> list[Any]:
        kind: Any = type(value)
        name = kind.__name__
        if kind in (tuple, frozenset) or (name in VIEWS and kind.__module__ == "builtins"):
            return [name, self._items(value)]
        if kind is bytes:
            return ["bytes", value.hex()]
        if kind is complex:
            return ["complex", self.encode(value.real), self.encode(value.imag)]
        if kind in (range, slice):
            return [name, *map(self.encode, (value.start, value.stop, value.step))]
        if kind is Fraction:
            return ["Fraction", self.encode(value.numerator), self.encode(value.denominator)]
        if kind is Decimal:
            return ["Decimal", str(value)]
        if kind is type and value in TYPES.values():
            return ["type", next(type_name for type_name, candidate in TYPES.items() if candidate is value)]
        if kind.__module__ == "numpy" and (array := _array(value)):
            return array
        reference: list[Any] = self._refer(value)
        return reference


def _dict_type(name: str) -> Any:
    return defaultdict if name == "defaultdict" else Counter if name == "Counter" else DICTS[name]


def _array(value: Any) -> list[Any] | None:
    """Return a numpy array or number by its bytes, or None for an array of objects."""
    if not hasattr(value, "dtype") or not hasattr(value, "tobytes") or value.dtype.kind not in "biufcSU":
        return None
    return ["array", value.dtype.str, list(value.shape), value.tobytes().hex(), type(value).__name__ == "ndarray"]


class Decoder:
    """Turns the JSON of one message into values. `resolve` returns the value of a reference.

    Raises ValueError, TypeError, KeyError or similar for anything that an Encoder did not write.
    """

    def __init__(self, resolve: Callable[[list[Any]], Any], containers: list[Any] | None = None) -> None:
        self.containers: list[Any] = list(containers or [])
        self._resolve = resolve

    def decode(self, form: Any) -> Any:
        """Return the value of a form."""
        if not isinstance(form, list):
            return form
        tag = form[0]
        if tag == "same":
            return self.containers[form[1]]
        if tag in ("list", "set", "bytearray", "deque") or tag in DICTS:
            container = self._empty(tag, form)
            if form[1] != len(self.containers):
                raise ValueError("containers are not numbered in order")
            self.containers.append(container)
            self.fill(container, form[2:])
            return container
        return self._frozen(tag, form)

    def _empty(self, tag: str, form: list[Any]) -> Any:
        if tag in DICTS:
            return DICTS[tag]({})
        return deque(maxlen=form[3]) if tag == "deque" else {"list": list, "set": set, "bytearray": bytearray}[tag]()

    def fill(self, container: Any, content: list[Any]) -> None:
        """Replace the content of a container."""
        if isinstance(container, bytearray):
            container[:] = bytes.fromhex(content[0])
            return
        if isinstance(container, dict):
            pairs = [(self.decode(key), self.decode(value)) for key, value in content[0]]
            container.clear()
            for key, value in pairs:
                dict.__setitem__(container, key, value)
            return
        items = [self.decode(item) for item in content[0]]
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(items)

    def _frozen(self, tag: str, form: list[Any]) -> Any:
        if tag in ("tuple", "frozenset"):
            return {"tuple": tuple, "frozenset": frozenset}[tag](map(self.decode, form[1]))
        if tag in VIEWS:
            return VIEWS[tag]([self.decode(item) for item in form[1]])
        if tag in ("complex", "range", "slice", "Fraction"):
            kind: Any = {"complex": complex, "range": range, "slice": slice, "Fraction": Fraction}[tag]
            return kind(*map(self.decode, form[1:]))
        if tag == "int":
            return int(form[1], 16)
        if tag == "array":
            return _from_array(*form[1:])
        if tag in ("float", "bytes", "Decimal", "type"):
            readers: dict[str, Any] = {
                "float": float, "bytes": bytes.fromhex, "Decimal": Decimal, "type": TYPES.__getitem__,
            }  # fmt: skip
            return readers[tag](form[1])
        return self._resolve(form)


def _from_array(dtype: str, shape: list[int], content: str, is_array: bool) -> Any:
    import numpy

    if numpy.dtype(dtype).kind not in "biufcSU":
        raise ValueError(f"an array of {dtype} cannot cross")
    array = numpy.frombuffer(bytes.fromhex(content), dtype=dtype).reshape(shape)
    return array.copy() if is_array else array[()]
