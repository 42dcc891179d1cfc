"""The record of routed experts: compact, checked, and joined from the requests that read a sample's tokens."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from slimectl.data.records import sample_from_json, sample_to_json
from slimectl.data.routed_experts import decoded, encoded, extended, routing_marks
from slimectl.errors import RecordError
from slimectl.types import TrainingSample

SAMPLE: dict[str, Any] = {"index": 3, "prompt": "1+1=", "tokens": [5, 6, 7], "response_length": 1}


@pytest.mark.parametrize(("experts", "dtype", "characters"), [(256, "uint8", 16), (257, "uint16", 32)])
def test_an_expert_is_one_byte_where_that_suffices(experts: int, dtype: str, characters: int):
    drawn = np.arange(experts - 12, experts).reshape(2, 3, 2)
    routing = json.loads(json.dumps(encoded(drawn)))
    assert (routing["shape"], routing["dtype"], len(routing["data"])) == ([2, 3, 2], dtype, characters)
    np.testing.assert_array_equal(decoded(routing), drawn)
    record = {**SAMPLE, "rollout_routed_experts": routing}
    assert sample_to_json(sample_from_json(record))["rollout_routed_experts"] == routing


@pytest.mark.parametrize("experts", [np.zeros((2, 2)), np.full((1, 1, 1), -1), np.full((1, 1, 1), 2**16)])
def test_what_is_no_expert_is_not_encoded(experts: np.ndarray):
    with pytest.raises(ValueError, match=r"expected|is not an expert"):
        encoded(experts)


GOOD = {"shape": [2, 1, 2], "dtype": "uint8", "data": "AAMCAQ=="}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [2, 2]}, "shape: expected [tokens, layers, experts of a token], got a list"),
        ({"shape": [2, 0, 2]}, "shape: expected"),
        ({"shape": [2, True, 2]}, "shape: expected"),
        ({"shape": [10**30, 1, 2]}, "data: 4 bytes, expected 2"),
        ({"dtype": "int32"}, "dtype: expected uint8 or uint16, got 'int32'"),
        ({"data": "AAM*"}, "data: expected base64, got 'AAM*'"),
        ({"data": [0, 3]}, "data: expected base64, got a list"),
        ({"data": "AAMC"}, "data: 3 bytes, expected 4 for [2, 1, 2] of uint8"),
        ({"more": 1}, "expected the keys shape, dtype and data, got data, dtype, more, shape"),
    ],
)
def test_a_record_of_another_form_is_refused(change: dict[str, Any], words: str):
    with pytest.raises(RecordError) as refusal:
        sample_from_json({**SAMPLE, "rollout_routed_experts": GOOD | change})
    assert f"Sample.rollout_routed_experts: {words}" in str(refusal.value)


def test_more_tokens_than_are_read_are_refused():
    with pytest.raises(RecordError, match="has experts for 2 tokens, but of 2 tokens all but the last one need them"):
        sample_from_json({**SAMPLE, "tokens": [5, 6], "rollout_routed_experts": GOOD})


def routing(*experts: int) -> dict[str, Any]:
    """One expert of each token, in one layer."""
    return encoded(np.array(experts).reshape(-1, 1, 1))


def test_a_token_keeps_the_experts_of_the_first_request_that_read_it():
    first, later = routing(1, 2), routing(7, 7, 3, 4)
    assert extended(None, later, tokens=9) == later
    assert extended(first, later, tokens=9) == routing(1, 2, 3, 4)
    assert extended(first, later, tokens=3) == routing(1, 2, 3)
    assert extended(first, later, tokens=1) == first
    assert extended(None, later, tokens=0) is None
    other = encoded(np.zeros((1, 2, 1), dtype=int))
    assert extended(other, later, tokens=2) == routing(7, 7)


def test_tokens_have_the_same_mark_where_their_experts_are_the_same():
    first, second = np.arange(12).reshape(3, 2, 2), np.arange(12).reshape(3, 2, 2)
    second[1, 0] = second[1, 0, ::-1]
    rows = [TrainingSample([1, 2, 3, 4, 5], 1, [], routed_experts=encoded(each)) for each in (first, second)]
    rows.append(TrainingSample([1, 2], 1, []))
    one, other, free = routing_marks(rows)
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, True, True]
    assert one[:3].all()
    assert (one[3], free.tolist()) == (0, [0])
