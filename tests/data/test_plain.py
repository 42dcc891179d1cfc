"""Numbers of other libraries are numbers of JSON; what JSON has no word for is refused, in one line."""

from __future__ import annotations

import enum
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from slimectl.data.json_values import kind_of, plain_reward
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.types import Sample, detached_copy, json_copy


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (True, 1.0), (3, 3), (0.5, 0.5), (numpy.float32(0.5), 0.5), (numpy.float64(0.5), 0.5), (numpy.int64(3), 3),
        (numpy.bool_(True), 1.0), (numpy.array(2.0), 2.0), (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor(True), 1.0), (Decimal("0.5"), 0.5), (Fraction(1, 4), 0.25), (enum.IntEnum("E", "A").A, 1),
        ({"a": numpy.bool_(False), "b": (1, [True]), "c": "x", "d": None, "e": numpy.arange(2)},
         {"a": 0.0, "b": [1, [1.0]], "c": "x", "d": None, "e": [0, 1]}),
    ],
)  # fmt: skip
def test_rewards_become_what_json_has(given: Any, wanted: Any):
    plain = plain_reward(given)
    assert plain == wanted
    assert type(plain) in (int, float, dict)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (float("nan"), "is nan, not a finite number"),
        (10**400, "is a number too large for a float, not a finite number"),
        ("1.0", "is '1.0', not a finite number"),
        (numpy.arange(2), "is of type ndarray, not a finite number"),
        (1j, "is of type complex, not a finite number"),
        (numpy.complex64(1), "is of type complex64"),
        (Decimal("nan"), "is of type Decimal, not a finite number"),
        (Sample(), "is of type Sample, not a finite number"),
        ((i for i in ()), "is of type generator"),
        ({"a": float("inf")}, "has inf under 'a', which JSON cannot represent"),
        ({1: 2.0}, "has the key 1, but keys must be strings"),
        ({"a": {1}}, "has of type set under 'a'"),
    ],
)
def test_others_are_refused(given: Any, words: str):
    with pytest.raises(ValueError) as error:
        plain_reward(given)
    assert words in str(error.value)


def test_a_dict_that_holds_itself_is_refused():
    circle: dict[str, Any] = {}
    circle["me"] = circle
    with pytest.raises(ValueError, match="more than 32 deep under 'me'"):
        plain_reward(circle)


def test_kinds_are_short():
    assert [kind_of(value) for value in (None, True, 5, "x" * 99, [1])] == [
        "None", "True", "5", repr("x" * 60), "list of 1",
    ]  # fmt: skip


def test_a_copy_of_json_shares_nothing_that_can_change_and_copies_other_objects_too():
    value = {"a": [1, {"b": None}], "c": {2, 3}, "d": (1.5, [True])}
    copied = json_copy(value)
    assert copied == value
    assert [type(each) for each in copied.values()] == [list, set, tuple]
    copied["a"][1]["b"] = 4
    copied["c"].add(5)
    copied["d"][1].append(6)
    assert value == {"a": [1, {"b": None}], "c": {2, 3}, "d": (1.5, [True])}


def test_a_reward_gets_a_copy_and_what_it_writes_there_is_not_kept(tmp_path: Path):
    (tmp_path / "writes.py").write_text(
        "def reward(sample):\n"
        "    sample.response = 'changed'\n"
        "    sample.tokens.append(9)\n"
        "    sample.metadata['list'].append(1)\n"
        "    return sample.metadata\n"
    )
    grader = builders.reward(Settings.model_validate({"score": {"custom_rm_path": f"{tmp_path}/writes.py:reward"}}))
    sample = Sample(response="as it was", tokens=[1], metadata={"score": 1.0, "list": []})
    before = detached_copy(sample)
    reward = grader(sample)
    assert sample == before
    assert reward == {"score": 1.0, "list": [1]}
    assert reward["list"] is not sample.metadata["list"]
