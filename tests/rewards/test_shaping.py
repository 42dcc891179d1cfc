"""What length and repetition cost, by hand."""

import pytest

from slimectl.errors import SettingsError
from slimectl.rewards import verifier
from slimectl.types import Sample

LENGTH = [
    ("length_penalty", {"limit": 100}, 0, 0.0),
    ("length_penalty", {"limit": 100}, 25, 0.25),
    ("length_penalty", {"limit": 100}, 100, 1.0),
    ("length_penalty", {"limit": 100}, 500, 1.0),
    ("length_penalty", {"limit": 100, "free_tokens": 60}, 60, 0.0),
    ("length_penalty", {"limit": 100, "free_tokens": 60}, 90, 0.75),  # 30 of the 40 between
    # DAPO's own setting: 16384 tokens expected, 4096 of buffer, 20480 at most
    ("overlong", {"limit": 20480, "buffer": 4096}, 16384, 0.0),
    ("overlong", {"limit": 20480, "buffer": 4096}, 17408, -0.25),
    ("overlong", {"limit": 20480, "buffer": 4096}, 20480, -1.0),
    ("overlong", {"limit": 20480, "buffer": 4096}, 20481, -1.0),
    ("overlong", {"limit": 20480, "buffer": 4096}, 0, 0.0),
]

REPETITION = [
    ({}, "one two three four", 0.0),
    ({}, "one two", 0.0),  # too short for a 3-gram
    ({}, "", 0.0),
    ({}, "a b c a b c", 0.25),  # abc bca cab abc: 3 of 4 distinct
    ({}, "a b c. a b c.", 1 - 4 / 6),  # abc bc. c.a .ab abc bc.: 4 of 6 distinct; the full stop is a word
    ({"n": 1}, "Go go GO stop", 0.5),  # go, stop of 4
    ({"n": 2}, "x x x x x", 0.75),  # one of 4
]


@pytest.mark.parametrize(("rm_type", "options", "length", "reward"), LENGTH)
def test_length(rm_type, options, length, reward):
    assert verifier(rm_type, **options)(Sample(response_length=length)) == reward


def test_the_length_penalty_with_weight_minus_1_is_the_overlong_penalty():
    for length in range(0, 120, 7):
        sample = Sample(response_length=length)
        assert verifier("overlong", limit=100, buffer=40)(sample) == -verifier(
            "length_penalty", limit=100, free_tokens=60
        )(sample)


@pytest.mark.parametrize(("options", "response", "reward"), REPETITION)
def test_repetition(options, response, reward):
    assert verifier("repetition", **options)(Sample(response=response)) == pytest.approx(reward)


def test_repetition_of_tokens_leaves_out_the_prompt():
    sample = Sample(tokens=[5, 5, 5, 5, 1, 2, 1, 2], response_length=4, response="whatever")
    assert verifier("repetition", n=2, unit="tokens")(sample) == pytest.approx(1 / 3)  # 12 21 12


def test_an_explanation_has_the_figures():
    why = verifier("overlong", limit=100, buffer=40).explain(Sample(response_length=70)).why
    assert why == "70 tokens: the buffer begins at 60, limit 100"
    assert verifier("repetition", n=2).explain(Sample(response="x x x")).why == "1 of 2 2-grams of words are distinct"


@pytest.mark.parametrize(
    ("rm_type", "options", "message"),
    [
        ("length_penalty", {}, r"rm_options\.limit: missing, and length_penalty needs it"),
        ("length_penalty", {"limit": 5, "free_tokens": 5}, "free_tokens: 5 must be at least 0 and below limit: 5"),
        ("overlong", {"limit": 5, "buffer": 6}, "buffer: 6 must be from 1 to limit: 5"),
        ("overlong", {"limit": 5}, r"rm_options\.buffer: missing"),
        ("overlong", {"limit": "5", "buffer": 1}, "wrong type"),
        ("repetition", {"n": 0}, "n: 0 must be 1 or more"),
        ("repetition", {"unit": "bytes"}, r"'bytes' is not a unit .*\('words', 'tokens'\)"),
    ],
)
def test_settings_that_make_no_sense_are_refused(rm_type, options, message):
    with pytest.raises(SettingsError, match=message):
        verifier(rm_type, **options)
