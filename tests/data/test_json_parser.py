"""The fast parser of JSON lines, compared with that of json."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slimectl.data import jsonl
from slimectl.errors import RecordError

SYNTAX = ["{", "}", "[", "]", ",", ":", '"', "\\", "\t", " ", "\r", "-", "\x00", "\ufeff"]
TEXTS = ['"a"', '"é"', '"\\ud800"', '"\\ud83d\\ude00"', "\\u0041", '{"a": 1, "a": 2}', '"x": [1, 2.5]']
NUMBERS = ["0", "1", "17", "01", ".5", "e5", "E308", "e+400", "1" * 30, "9007199254740993", "1e-7", "0.1", "5e-324"]
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
        patch.setattr(jsonl, "from_json", refuse)
        return jsonl.parse_line(line, location=location)


@given(st.lists(st.sampled_from(SYNTAX + TEXTS + NUMBERS + WORDS), max_size=12).map("".join), st.booleans())
@example('"a": ' + "[" * 300 + "]" * 300, True)
@example('"a": "' + "x" * 5000 + '"', True)
@example('"a": ' + "7" * 5000, True)
@example('"a": ' + "7" * 400 + ".5", True)
@settings(max_examples=1000)
def test_it_takes_and_refuses_the_same_text(text: str, in_object: bool):
    line = (f"{{{text}}}\n" if in_object else f"{text}\n").encode()
    assert outcome(line) == outcome(line, read_by_json)


@given(st.dictionaries(st.text(), VALUES), st.booleans())
@settings(max_examples=200)
def test_it_reads_the_same_value(value: dict[str, Any], ascii_only: bool):
    line = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    assert outcome(line) == outcome(line, read_by_json)
