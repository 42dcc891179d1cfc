"""JSON encoding of records by orjson, and by Python's json for what orjson rejects or reads differently.

orjson reads integers of more than 64 bits as floats, rejects half of a surrogate pair and keys that are not strings,
and writes NaN as null.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

_DIGITS = bytes(ord("0") if chr(code) in "0123456789" else code if code == ord(".") else 32 for code in range(256))
"""Byte translation table: digits to 0, a point to itself, everything else to a space."""
_LONG_NUMBER = b"0" * 19
"""Digits, translated by `_DIGITS`, of an integer that may exceed 64 bits."""
_LONG_INTEGER = b" " + _LONG_NUMBER


def decode_object(line: bytes) -> Any:
    """Parse a line of UTF-8. Objects are parsed by orjson. Raises ValueError, RecursionError.

    A line that orjson rejects is parsed by `decode_json`, which accepts it or raises with the reason.
    """
    digits = line.translate(_DIGITS)
    if _LONG_NUMBER not in digits or _LONG_INTEGER not in digits:
        with suppress(ValueError):
            value = orjson.loads(line)
            if type(value) is dict:
                return value
    return decode_json(line.rstrip(b"\r\n").decode())


def decode_json(text: str) -> Any:
    """Parse JSON text. Raises ValueError, also for NaN and numbers too large for a float, and RecursionError."""
    return _decode_checked(text) if _LARGE_EXPONENT.search(text) else _decode(text)


def _refuse_constant(token: str) -> float:
    raise ValueError(f"{token} is not a JSON number")


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.40} is too large for a float")
    return number


STRICT_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float)
"""Raises ValueError for NaN, infinity, and numbers too large for a float."""
_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode
# A callback per number makes parsing three times slower, so it is used only for text that may hold such a number.
_decode_checked = STRICT_DECODER.decode
_LARGE_EXPONENT = re.compile(r"[eE]\+?\d\d\d")

_OPTIONS = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_encode_ascii = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def encode_json(value: Any) -> bytes:
    """Encode a value as JSON without spaces, in UTF-8.

    Raises ValueError for NaN and infinity, TypeError for values that are not JSON, RecursionError.
    """
    try:
        return _encode_by_orjson(value)
    except TypeError:  # keys that are numbers, integers of more than 64 bits, subclasses of float
        try:
            return _encode(value).encode()
        except UnicodeEncodeError:  # half of a surrogate pair: only an escape can represent it
            return _encode_ascii(value).encode()


def encode_with_texts(obj: Mapping[str, Any], texts: Mapping[str, bytes]) -> bytes:
    """Encode an object some of whose entries are already JSON. Raises ValueError, and TypeError where orjson does."""
    return _encode_by_orjson({**obj, **{key: orjson.Fragment(text) for key, text in texts.items()}})


def _encode_by_orjson(value: Any) -> bytes:
    text = orjson.dumps(value, option=_OPTIONS)
    if (nulls := text.count(b"null")) and nulls != _entries_that_are_none(value) and _has_nonfinite(value):
        raise ValueError("Out of range float values are not JSON compliant")
    return text


def _entries_that_are_none(value: Any) -> int:
    return sum(entry is None for entry in value.values()) if isinstance(value, Mapping) else 0


def _has_nonfinite(value: Any) -> bool:
    """Return whether a value contains NaN or infinity, which orjson writes as null."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if not isinstance(value, dict | list | tuple) or b"null" not in orjson.dumps(value, option=_OPTIONS):
        return False
    return any(map(_has_nonfinite, value.values() if isinstance(value, Mapping) else value))


def float32_text(values: Sequence[float]) -> bytes | None:
    """Encode numbers as the shortest decimals that read back as the same float32. None if one is not a float32.

    >>> float32_text([0.10000000149011612, -0.5]), float32_text([0.1])
    (b'[0.1,-0.5]', None)
    """
    import numpy as np

    try:
        doubles = np.frombuffer(array("d", values))
    except (TypeError, ValueError, OverflowError):
        return None
    with np.errstate(over="ignore"):
        floats = doubles.astype(np.float32)
    if not (floats == doubles).all():
        return None
    text = orjson.dumps(floats, option=orjson.OPT_SERIALIZE_NUMPY)
    return None if b"null" in text else text  # infinity is null


def nearest_float32(values: Sequence[float]) -> list[float]:
    """Round numbers to float32. Numbers that are too large become infinite."""
    return array("f", values).tolist()
