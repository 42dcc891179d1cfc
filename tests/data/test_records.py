"""A sample as a line of JSON: what is kept, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimectl.data import checks
from slimectl.data.checks import one_edit_apart
from slimectl.data.jsonl import encode_sample, read_sample
from slimectl.data.records import CHECKS, sample_from_json, sample_to_json
from slimectl.errors import RecordError
from slimectl.types import Sample, Status


def scored() -> Sample:
    return Sample(
        group_index=4,
        index=33,
        prompt="1+1=",
        tokens=[5, 6, 7, 8],
        response="2\n",
        response_length=2,
        label="2",
        reward=1.0,
        loss_mask=[1, 1],
        rollout_log_probs=[-0.1, -2.5],
        status=Status.COMPLETED,
        weight_versions=["3"],
    )


def test_sample_survives_the_round_trip_and_stays_short():
    obj = sample_to_json(scored())
    assert sample_from_json(json.loads(json.dumps(obj))) == scored()
    assert list(obj) == [key for key in CHECKS if key in obj]  # the order of the table
    assert "remove_sample" not in obj
    assert "teacher_log_probs" not in obj


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)), st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back_to_the_last_digit(log_probs: list[float], reward: float):
    sample = Sample(response_length=len(log_probs), rollout_log_probs=log_probs, reward=reward)
    again = sample_from_json(json.loads(json.dumps(sample_to_json(sample))))
    assert again.rollout_log_probs == log_probs
    assert again.reward == reward


def test_unknown_keys_pass_through_untouched():
    obj = {**sample_to_json(scored()), "note": {"by": [1, None]}, "zz": None}
    assert sample_from_json(obj).extra == {"note": {"by": [1, None]}, "zz": None}
    assert sample_to_json(sample_from_json(obj)) == obj


def test_key_one_edit_away_warns_once_naming_both(caplog: pytest.LogCaptureFixture):
    checks._warned.clear()
    for _ in range(3):
        assert sample_from_json({"rewrad": 1.0}).extra == {"rewrad": 1.0}
    assert caplog.messages == ["Sample.rewrad: unknown key, kept unchanged. Did you mean reward?"]


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [("lable", "label", True), ("label", "labels", True), ("idex", "index", True), ("labex", "label", True),
     ("label", "label", False), ("lbeal", "label", False), ("", "ab", False), ("balel", "label", False)],
)  # fmt: skip
def test_one_edit(a: str, b: str, apart: bool):
    assert one_edit_apart(a, b) is apart
    assert one_edit_apart(b, a) is apart


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_log_probs": [0.0] * 12}, "Sample.rollout_log_probs: 12 values for 2 response tokens"),
        ({"loss_mask": [1]}, "Sample.loss_mask: 1 values for 2 response tokens"),
        ({"teacher_log_probs": []}, "Sample.teacher_log_probs: 0 values for 2 response tokens"),
        ({"ref_log_probs": [0.0] * 3}, "Sample.ref_log_probs: 3 values for 2 response tokens"),
        ({"tokens": [5]}, "Sample.tokens: 1 tokens are fewer than response_length 2"),
        ({"tokens": [5, "6", 7, 8]}, "Sample.tokens: expected a list of token ids, got '6' at [1]"),
        ({"tokens": [5, True, 7, 8]}, "Sample.tokens: expected a list of token ids, got true at [1]"),
        ({"tokens": [5, 6, 7, -8]}, "Sample.tokens: -8 is not a token id"),
        ({"loss_mask": [1, 2]}, "Sample.loss_mask: 2 is neither 0 nor 1"),
        ({"rollout_log_probs": [0.0, math.nan]}, "Sample.rollout_log_probs: nan is not a finite number"),
        ({"rollout_log_probs": [0, 10**400]}, "Sample.rollout_log_probs: a number too large for a float"),
        ({"reward": math.inf}, "Sample.reward: inf is not a finite number"),
        ({"reward": "1.0"}, "Sample.reward: expected a number, got '1.0'"),
        ({"index": -1}, "Sample.index: expected a number from 0 to 2^63, got -1"),
        ({"index": 1.0}, "Sample.index: expected a whole number, got 1.0"),
        ({"index": None}, "Sample.index: expected a whole number, got null"),
        ({"status": "done"}, "Sample.status: 'done' is not one of pending, completed, truncated, aborted, failed"),
        ({"label": True}, "Sample.label: expected a string or a number, got true. Put anything else into metadata"),
        ({"prompt": [{"content": "hi"}]}, "Sample.prompt: message 0 of the chat: expected {role, content}, got an"),
        ({"metadata": []}, "Sample.metadata: expected an object, got a list"),
        ({"turn_rewards": [0.5, "a"]}, "Sample.turn_rewards: turn 1: got str, expected a number, or an object with"),
        (
            {"turn_rewards": [1, {"reward": 1, "start": 1, "end": 3}]},
            "Sample.turn_rewards: a turn ends at token 3, but the response has 2 tokens",
        ),
        ({"remove_sample": 1}, "Sample.remove_sample: expected true or false, got 1"),
    ],
)
def test_bad_value_is_named(change: dict[str, Any], message: str):
    with pytest.raises(RecordError) as error:
        sample_from_json({**sample_to_json(scored()), **change})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[]], "1 values for 2 response tokens"),
        ([[], 0.5], "expected a list of lists of [token, log-probability], got 0.5 at [1]"),
        ([[], [5, -0.5]], "expected pairs of [token, log-probability] at [1]"),
        ([[[5, -0.5, 1]], []], "expected pairs of [token, log-probability] at [0]"),
        ([[[-5, -0.5]], []], "-5 is not a token id, in the pairs at [0]"),
        ([[[5, None]], []], "expected a list of numbers, got null at [0], in the pairs at [0]"),
        ([[[5, -0.5], [5, -2.0]], []], "a token occurs twice at [0]"),
        ([[[5, -2.0], [6, -0.5]], []], "the pairs at [0] are not sorted, the likeliest first"),
        ([[[5, 0.5]], []], "0.5 at [0] is not the logarithm of a probability"),
    ],
)
def test_bad_pairs_of_a_teacher_are_named(value: Any, message: str):
    with pytest.raises(RecordError, match="^" + re.escape(f"Sample.teacher_top_log_probs: {message}") + "$"):
        sample_from_json({**sample_to_json(scored()), "teacher_top_log_probs": value})


def test_pairs_of_a_teacher_are_read_as_they_were_written():
    pairs = [[(7, -0.1), (9, -2.5)], []]
    sample = dataclasses.replace(scored(), teacher_top_log_probs=pairs)
    read = read_sample(encode_sample(sample, location=""), location="", position=0)
    assert read.teacher_top_log_probs == [[[7, -0.1], [9, -2.5]], []]


def test_null_stands_for_nothing_given():
    sample = sample_from_json({"metadata": None, "weight_versions": None, "label": None, "loss_mask": None})
    assert (sample.metadata, sample.weight_versions, sample.loss_mask) == ({}, [], None)


def test_hand_written_samples_are_groups_of_their_own():
    first, second = (sample_from_json({"prompt": "1+1=", "response": "2"}, position=i) for i in range(2))
    assert (first.index, first.group_index) == (0, 0)
    assert (second.index, second.group_index) == (1, 1)
