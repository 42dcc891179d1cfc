"""JSON by orjson, compared with Python's json: the same texts and values are accepted, refused and written."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slimectl.data import json_codec, jsonl
from slimectl.data.json_codec import encode_json, float32_text, nearest_float32
from slimectl.errors import RecordError

SYNTAX = ["{", "}", "[", "]", ",", ":", '"', "\\", "\t", " ", "\r", "-", "\x00", "\ufeff"]
TEXTS = ['"a"', '"é"', '"\\ud800"', '"\\ud83d\\ude00"', "\\u0041", '{"a": 1, "a": 2}', '"x": [1, 2.5]']
NUMBERS = ["0", "1", "17", "01", ".5", "e5", "E308", "e+400", "1" * 30, "18446744073709551616", "0." + "0" * 30 + "1",
           "9007199254740993", "1e-7", "0.1", "5e-324"]  # fmt: skip
WORDS = ["true", "null", "NaN", "-Infinity", "1.7976931348623157e308"]
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.floats())


def outcome(line: bytes, parse: Callable[..., Any] = jsonl.parse_line) -> str:
    """The value with the types of its numbers, or the error."""
    try:
        return repr(parse(line, location="f:1"))
    except RecordError as error:
        return f"error {error}"


def read_by_json(line: bytes, *, location: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_codec.orjson, "loads", refuse)
        return jsonl.parse_line(line, location=location)


@given(st.lists(st.sampled_from(SYNTAX + TEXTS + NUMBERS + WORDS), max_size=12).map("".join), st.booleans())
@example('"a": ' + "[" * 300 + "]" * 300, True)
@example('"a": "' + "x" * 5000 + '"', True)
@example('"a": ' + "7" * 5000, True)
@example('"a": ' + "7" * 400 + ".5", True)
@example('"a": -9223372036854775809', True)
@example("9" * 30, False)
@settings(max_examples=1000)
def test_it_takes_and_refuses_the_same_text(text: str, in_object: bool):
    line = (f"{{{text}}}\n" if in_object else f"{text}\n").encode()
    assert outcome(line) == outcome(line, read_by_json)


@given(st.dictionaries(st.text(), VALUES), st.booleans())
@settings(max_examples=200)
def test_it_reads_the_same_value(value: dict[str, Any], ascii_only: bool):
    line = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    assert outcome(line) == outcome(line, read_by_json)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES)
@example([None, {"a": math.nan}])
@example({"a": None, "b": ["null"]})
@example({"a": None, "b": math.inf})
@example({1: -math.inf})
@example({"half of a pair": "\ud83d"})
@example([2**64, -(2**63) - 1])
@settings(max_examples=300)
def test_it_writes_what_json_reads_back_and_refuses_nan(value: Any):
    try:
        reference = json.dumps(value, allow_nan=False)
    except ValueError:
        with pytest.raises(ValueError, match="Out of range"):
            encode_json(value)
        return
    text = encode_json(value)
    assert repr(json.loads(text)) == repr(json.loads(reference))
    assert b"\n" not in text


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object(), {"a": [object()]}, {"at": date(2026, 1, 1)}])
def test_a_value_that_is_no_json_is_refused(value: Any):
    with pytest.raises(TypeError):
        encode_json(value)


def float32_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


@given(st.lists(st.integers(0, 2**32 - 1).map(float32_of).filter(math.isfinite), min_size=1))
@example([float32_of(bits) for bits in (0, 0x80000000, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xBDCCCCCD, 0x4B7FFFFF)])
def test_float32_numbers_come_back_as_they_were_in_at_most_nine_digits(numbers: list[float]):
    text = float32_text(numbers)
    assert text is not None
    assert list(map(repr, nearest_float32(json.loads(text)))) == list(map(repr, numbers))
    digits = [
        number.lstrip("-").partition("e")[0].replace(".", "").strip("0") for number in text.decode()[1:-1].split(",")
    ]
    assert max(map(len, digits)) <= 9


@pytest.mark.parametrize("numbers", [[0.1], [1e39], [math.inf], [math.nan], ["0.5"], [None], [2**200], [-0.5, 1e-50]])
def test_numbers_that_float32_does_not_hold_have_no_short_form(numbers: list[Any]):
    assert float32_text(numbers) is None
