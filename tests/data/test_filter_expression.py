"""Filters read records, refuse everything that could run, and treat what is missing as absent."""

from __future__ import annotations

import pytest

from slimectl.data.filter_expression import FilterExpression
from slimectl.errors import SettingsError

RECORD = {
    "reward": 0.5,
    "response": "the cat\nsat",
    "status": "completed",
    "label": None,
    "metadata": {"level": 3, "tags": ["a", "b"], "Ünï": {"deep": True}},
}


@pytest.mark.parametrize(
    "text",
    [
        "reward >= 0.5", "reward == 1/2", "0 < reward < 1", "not reward > 0.5", "'cat' in response",
        "'dog' not in response", "status == 'completed' and metadata.level == 3", "metadata.level in [1, 3]",
        "'b' in metadata.tags", "metadata.Ünï.deep == true", "label == none", "label is None", "reward * 2 + 1 == 2",
        "metadata.nothing == null", "-reward < 0", "reward > 1 or status != 'failed'", "metadata.level - 1 > 1.5",
    ],
)  # fmt: skip
def test_a_condition_that_holds(text: str):
    assert FilterExpression(text).matches(RECORD)
    assert not FilterExpression(f"not ({text})").matches(RECORD)


@pytest.mark.parametrize(
    "text",
    ["reward > 'a'", "metadata.nothing > 1", "reward / 0 > 1", "'a' in reward", "response.lower == 'x'", "label < 3",
     "metadata.tags.x == 1", "response.__class__ == 'str'", "1e308 * 1e308 * reward < 1"],
)  # fmt: skip
def test_values_that_cannot_be_compared_do_not_match(text: str):
    assert not FilterExpression(text).matches(RECORD)


@pytest.mark.parametrize(
    "text",
    ["", "reward >", "open('x')", "response.lower()", "[x for x in response]", "lambda: 1", "reward if 1 else 2",
     "metadata['level'] == 3", "f'{reward}'", "reward ** 99999", "(x := 1)", "{'a': 1}", "reward\nstatus", "b'x' == 1",
     "(" * 300 + "1" + ")" * 300, "1 +" * 400 + "1", "~1", "*reward", "...", "10 ** 10 ** 10"],
)  # fmt: skip
def test_anything_else_is_refused_in_one_line(text: str):
    with pytest.raises(SettingsError) as refusal:
        FilterExpression(text)
    assert str(refusal.value).startswith("filter: ")
    assert "\n" not in str(refusal.value).replace(repr(text), "")


def test_names_are_the_fields_that_are_read():
    assert FilterExpression("reward < 1 and metadata.level == 3").names == {"reward", "metadata.level", "metadata"}
