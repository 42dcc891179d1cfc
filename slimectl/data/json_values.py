"""Conversion of values from user functions and tables, such as numpy numbers and decimals, to JSON types."""

from __future__ import annotations

import base64
import math
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from slimectl.types import Sample

DEEPEST = 32
"""Maximum nesting depth of objects and lists in a reward."""


_PYTHON = frozenset({str, int, float, bool, type(None)})


def plain_number(value: Any) -> int | float | None:
    """Return a number of any library as a Python int or float, or None if the value is not a single number.

    >>> from decimal import Decimal
    >>> plain_number(True), plain_number(Decimal("0.5")), plain_number("0.5")
    (1.0, 0.5, None)
    """
    if type(value) is int or type(value) is float:
        return value
    if isinstance(value, str | bytes) or getattr(value, "ndim", None) or isinstance(value, complex):
        return None
    try:
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, complex):
            return None
        if isinstance(number, int) and not isinstance(number, bool):
            return int(number)
        return float(number) if hasattr(number, "__float__") else None
    except Exception:  # symbols, empty arrays and the like
        return None


def plain_value(value: Any) -> Any:
    """Convert numbers, bools and arrays of other libraries in a value to Python's, at any depth.

    >>> from numpy import arange, bool_, float32
    >>> plain_value({"a": arange(2), "b": [float32(0.5), "text"], "c": (bool_(True), None)})
    {'a': [0, 1], 'b': [0.5, 'text'], 'c': (True, None)}

    A value that contains none of these is returned unchanged.
    """
    kind = type(value)
    if value is None or kind in _PYTHON:
        return value
    if kind is list or kind is tuple:
        return value if _PYTHON.issuperset(map(type, value)) else kind(map(plain_value, value))
    if isinstance(value, dict):
        members = {plain_value(key): plain_value(member) for key, member in value.items()}
        return value if all(members[key] is member for key, member in value.items()) else members
    if isinstance(value, str | bytes) or not hasattr(value, "tolist"):
        return value
    return value.tolist()


def plain_numbers(values: Any) -> list[Any]:
    """Return a tensor, an array, a sequence or a single value as a list of Python numbers."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    members = list(values) if isinstance(values, list | tuple) else [values]
    if _PYTHON.issuperset(map(type, members)):
        return members
    numbers = map(plain_number, members)
    return [member if number is None else number for member, number in zip(members, numbers, strict=True)]


def plain_sample(sample: Sample) -> Sample:
    """Return a sample that a user function has changed, with plain numbers in all of its fields."""
    for name in sample.__dataclass_fields__:
        value = getattr(sample, name)
        if name == "reward" and value is not None:
            with suppress(ValueError):  # grading rejects it with the sample's location
                setattr(sample, name, plain_reward(value))
        elif (plain := plain_value(value)) is not value:
            setattr(sample, name, plain)
    return sample


def cell_value(value: Any) -> Any:
    """Convert a table cell to JSON types at any depth. Bytes and objects of other classes are unchanged.

    >>> from datetime import date
    >>> from numpy import float32
    >>> cell_value({"a": float("nan"), "b": (Decimal("1.00"), date(2026, 1, 2)), "c": float32(0.1)})
    {'a': None, 'b': ['1.00', '2026-01-02'], 'c': 0.1}

    NaN is a missing value, as in pandas. Decimals keep their digits. Dates and times become text.
    """
    kind = type(value)
    if value is None or kind is str or kind is int or kind is bool or kind is bytes:
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, dict):
        return {cell_value(key): cell_value(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [cell_value(member) for member in value]
    if isinstance(value, Decimal):
        return None if value.is_nan() else format(value, "f")
    if isinstance(value, date | time | timedelta | UUID):
        return None if value != value else str(value)  # pandas' NaT is a date
    if isinstance(value, str | bytes) or not hasattr(value, "tolist"):
        return value
    dtype = str(getattr(value, "dtype", ""))
    return cell_value(shortest_decimals(value, dtype) if dtype in ("float16", "float32") else value.tolist())


def shortest_decimals(numbers: Any, dtype: str) -> Any:
    """Return numbers of a narrow type as the Python floats of their shortest decimals.

    >>> shortest_decimals(0.10000000149011612, "float32"), shortest_decimals([0.0999755859375], "float16")
    (0.1, [0.1])
    """
    import numpy as np

    return np.asarray(numbers, dtype=dtype).astype(str).astype(float).tolist()


def jsonable(value: Any) -> Any:
    """Convert to JSON types: tuples and sets to lists, keys to strings, arrays to lists and numbers, bytes to base64.

    Anything else becomes text. A number that is not finite, such as a missing value of a table, becomes None.
    """
    if isinstance(value, dict):
        return {str(key): jsonable(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(member) for member in value]
    if isinstance(value, set | frozenset):
        return sorted((jsonable(member) for member in value), key=str)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "tolist"):  # arrays and tensors, including scalars
        return jsonable(value.tolist())
    return str(value)


NONE_REMEDY = ', or set score.none_reward = "skip" if None means no opinion'
"""End of the error about a reward of None."""


def plain_reward(value: Any) -> Any:
    """Convert a reward to JSON types: a number, or an object whose entries are JSON values.

    >>> plain_reward({"score": True, "parts": (1, None), "note": "ok"})
    {'score': 1.0, 'parts': [1, None], 'note': 'ok'}

    Raises ValueError, with the reason, for any other value.
    """
    if isinstance(value, dict):
        return {_key(key): _entry(entry, str(key), DEEPEST) for key, entry in value.items()}
    number = plain_number(value)
    if number is None or not is_finite(number):
        remedy = NONE_REMEDY if value is None else ""
        raise ValueError(f"is {kind_of(value)}, not a finite number. Fix the reward function{remedy}")
    return number


def is_finite(number: int | float) -> bool:
    """Return whether the number is finite as a float. Integers in JSON may be too large for one."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _key(key: Any) -> str:
    if type(key) is not str:
        raise ValueError(f"has the key {kind_of(key)}, but keys must be strings")
    return key


def _entry(value: Any, key: str, depth: int) -> Any:
    if value is None or type(value) is str:
        return value
    if not depth:
        raise ValueError(f"has objects more than {DEEPEST} deep under {key!r:.60}. Return a flat object.")
    if isinstance(value, dict):
        return {_key(name): _entry(entry, key, depth - 1) for name, entry in value.items()}
    if getattr(value, "ndim", 0):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_entry(entry, key, depth - 1) for entry in value]
    if isinstance(value, str):
        return str(value)
    number = plain_number(value)
    if number is None or not is_finite(number):
        raise ValueError(
            f"has {kind_of(value)} under {key!r:.60}, which JSON cannot represent. Return numbers or strings."
        )
    return number


def kind_of(value: Any) -> str:
    """Describe a value for an error message: the value itself if short, else its type and length.

    >>> kind_of(None), kind_of([1, 2]), kind_of(2.5)
    ('None', 'list of 2', '2.5')
    """
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        size = abs(value)
        return str(value) if size < 10**18 else f"{value:.3e}" if size < 10**300 else "a number too large for a float"
    if isinstance(value, str | bytes):
        return f"{value[:60]!r}"
    if isinstance(value, list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"
