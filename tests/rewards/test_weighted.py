"""Weighted sums: the total by hand, the parts as they are."""

import pickle

import pytest

from slimectl.errors import SettingsError
from slimectl.rewards import weighted
from slimectl.types import Sample

MATH_AND_LENGTH = [{"type": "math", "weight": 1.0}, {"type": "length_penalty", "weight": -0.1, "limit": 100}]

TABLE = [
    (MATH_AND_LENGTH, r"\boxed{5}", {"score": 0.975, "math": 1.0, "length_penalty": 0.25}),  # 1 - 0.1 * 25 / 100
    (MATH_AND_LENGTH, r"\boxed{6}", {"score": -0.025, "math": 0.0, "length_penalty": 0.25}),
    ([{"type": "dapo"}, {"type": "overlong", "limit": 20, "buffer": 10}], "Answer: 5",
     {"score": 0.0, "dapo": 1.0, "overlong": -1.0}),
    ([{"type": "dapo", "key": "acc", "weight": 2}], "Answer: 5", {"score": 2.0, "dapo": 1.0}),
    ([{"type": "exact", "name": "strict"}, {"type": "exact", "name": "lax", "weight": 0.5, "source": "last_line"}],
     "so\n5", {"score": 0.5, "strict": 0.0, "lax": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "response", "reward"), TABLE)
def test_the_sum_and_its_parts(parts, response, reward):
    sample = Sample(response=response, label="5", response_length=25)
    assert weighted(parts)(sample) == pytest.approx(reward)
    assert pickle.loads(pickle.dumps(weighted(parts))) == weighted(parts)


def test_the_explanation_is_that_of_every_part():
    sample = Sample(response=r"so \boxed{6}", label="5", response_length=25)
    verdict = weighted(MATH_AND_LENGTH).explain(sample)
    assert (verdict.extracted, verdict.span, verdict.source) == ("6", (10, 11), r"last \boxed{}")
    assert verdict.why == (
        "1 x math 0 (does not equal the label '5' (read as '6')); "
        "-0.1 x length_penalty 0.25 (25 tokens: free up to 0, limit 100)"
    )


def test_the_bounds_follow_from_weights_and_parts():
    assert weighted(MATH_AND_LENGTH).bounds == (-0.1, 1.0)
    assert weighted([{"type": "dapo", "weight": -2}]).bounds == (-2.0, 2.0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], r"score\.rm: no parts"),
        ([{"weight": 1}], r"score\.rm\[0\]\.type: missing\. Name a verifier"),
        ([{"type": "math"}, {"type": "maths"}], r"score\.rm\[1\]: no verifier 'maths'\. Did you mean math\?"),
        ([{"type": "math", "weight": "1"}], r"score\.rm\[0\]\.weight: '1' is not a finite number"),
        ([{"type": "math", "weight": float("nan")}], "not a finite number"),
        ([{"type": "math"}, {"type": "math"}], r"score\.rm\[1\]\.name: 'math' is taken"),
        ([{"type": "math", "name": "score"}], r"score\.rm\[0\]\.name: 'score' is taken"),
        ([{"type": "repetition", "m": 2}], r"score\.rm\[0\]\.m: no option of repetition"),
    ],
)
def test_a_sum_that_cannot_be_is_refused(parts, message):
    with pytest.raises(SettingsError, match=message):
        weighted(parts)
