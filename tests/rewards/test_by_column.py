"""Rewards by a column of the row: verl's sources of data, ROLL's tags."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from graders import grading, says

from slimectl.errors import RecordError, SettingsError
from slimectl.rewards import verifier
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.stages.grader import Grader
from slimectl.types import Sample

TWICE = "```python\nprint(2 * int(input()))\n```"


@pytest.mark.parametrize(
    ("source", "response", "label", "reward"),
    [  # the rules of verl 0.9.1, verl/utils/reward_score/__init__.py
        ("openai/gsm8k", "so #### 1,234", "1234", 1.0),
        ("openai/gsm8k", "#### 5 no, #### 6", "6", 1.0),
        ("openai/gsm8k", "it is 1234", "1234", 0.0),
        ("lighteval/MATH", r"\boxed{\frac12}", "1/2", 1.0),
        ("HuggingFaceH4/MATH-500", "it is 1/2", "1/2", 0.0),
        ("math_dapo", "Answer: 7", "7", 1.0),
        ("aime2024", "Answer: 8", "7", -1.0),
        ("numina_olympiads", r"\boxed{3}", "3", 1.0),
        ("hiyouga/geometry3k", r"\boxed{12}", "12", 1.0),
        ("apps", TWICE, '{"inputs": ["2", "3"], "outputs": ["4", "7"]}', 0.5),
        ("taco", TWICE, {"inputs": ["2"], "outputs": ["4"]}, 1.0),
        ("searchR1_nq", "<answer> Paris </answer>", {"target": "paris"}, 1.0),
        ("searchR1_musique", "Paris", {"target": "Paris"}, 0.0),
    ],
)
def test_every_source_of_verl_has_its_verifier(source: str, response: str, label: object, reward: float):
    by_source = verifier("by_column")
    graded = by_source(Sample(response=response, label=label, extra={"data_source": source}))
    assert (graded["score"] if isinstance(graded, dict) else graded) == reward


def test_own_types_are_read_from_the_row_or_its_metadata():
    options = {"column": "tag", "types": {"math*": "math", "*": {"type": "contains", "ignore_case": True}}}
    by_tag = verifier("by_column", **options)
    math = Sample(response=r"\boxed{0.5}", label="1/2", metadata={"tag": "math_500"})
    other = Sample(response="In PARIS.", label="Paris", extra={"tag": "trivia"})
    assert [by_tag(math), by_tag(other)] == [1.0, 1.0]
    assert by_tag.extract(math) == "0.5"
    assert by_tag.same_answer(math, "0.5", r"\frac{1}{2}")
    assert not by_tag.same_answer(other, "Paris", "Rome")
    assert by_tag.bounds == (0.0, 1.0)
    assert verifier("by_column").bounds == (-1.0, 1.0)  # dapo's wrong answer is -1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"index": 3}, "sample 0: data_source: missing, and score.rm_type by_column grades by it"),
        ({"data_source": "mine"}, "sample 0: data_source 'mine' has no verifier. Add it to score.rm_options.types"),
    ],
)
def test_a_row_that_no_verifier_grades_is_an_error_that_names_it(row: dict[str, object], message: str):
    with pytest.raises(RecordError) as error:
        verifier("by_column")(Sample(response="4", label="4", extra=row))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"types": {"a": "mathh"}}, "no verifier 'mathh'"),
        ({"types": {"a": {"tolerance": 1}}}, "score.rm_options.types.a: {'tolerance': 1} does not name a verifier"),
        ({"types": {"a": "by_column"}}, "score.rm_options.types.a: 'by_column' does not name a verifier"),
    ],
)
def test_types_that_name_no_verifier_are_refused(options: dict[str, object], message: str):
    with pytest.raises(SettingsError) as error:
        verifier("by_column", **options)
    assert message in str(error.value)


@pytest.mark.parametrize(("pattern", "message"), [("####.*", "has no group"), ("(", "not a regular expression")])
def test_a_pattern_of_numeric_captures_the_number(pattern: str, message: str):
    with pytest.raises(SettingsError) as error:
        verifier("numeric", pattern=pattern)
    assert message in str(error.value)


DOMAINS = {
    "math*": [{"type": "math"}, {"type": "length_penalty", "name": "long", "weight": -0.5, "limit": 4}],
    "chat": {"path": "{own}:polite"},
    "open": "judge",
    "*": {"type": "exact", "ignore_case": True},
}


def by_domain(types: dict[str, Any], **score: Any) -> Grader:
    given = {"rm_type": "by_column", "rm_options": {"column": "tag", "types": types}, **score}
    return builders.reward(Settings.model_validate({"score": given}))


@pytest.fixture
def domains(tmp_path: Path) -> dict[str, Any]:
    own = tmp_path / "own.py"
    own.write_text("def polite(sample):\n    return float('please' in sample.response)\n")
    return DOMAINS | {"chat": {"path": f"{own}:polite"}}


def test_every_domain_has_its_sum_its_function_or_its_verifier_with_options(domains: dict[str, Any]):
    graders = by_domain({name: entry for name, entry in domains.items() if name != "open"})
    graded = [
        graders(Sample(response=response, label=label, response_length=2, metadata={"tag": tag}))
        for tag, response, label in (
            ("math_1", r"\boxed{4}", "4"),
            ("chat", "please", None),
            ("quiz", "PARIS", "Paris"),
        )
    ]
    assert graded == [{"score": 0.75, "math": 1.0, "long": 0.5}, 1.0, 1.0]  # 1 - 0.5 * 2 / 4
    again = pickle.loads(pickle.dumps(graders))  # as for a worker process
    assert again(Sample(response="please", metadata={"tag": "chat"})) == 1.0
    assert graders.runs_user_code(Sample(metadata={"tag": "chat"}))


def test_a_domain_with_a_server_gets_its_address(domains: dict[str, Any]):
    with grading(lambda body: says("Score: 7")) as server:
        graders = by_domain(domains, rm_url=server.url)
        assert graders(Sample(response="x", metadata={"tag": "open"})) == 0.7


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([{"type": "maths"}], r"score.rm_options.types.a\[0\]: no verifier 'maths'"),
        (["math"], r"score.rm_options.types.a\[0\]: 'math' is not a table"),
        ([], "score.rm_options.types.a: no parts"),
        ({"path": "own.py:f", "weight": 2}, "score.rm_options.types.a: a function has no options"),
        ({"weight": 2}, "score.rm_options.types.a: .* does not name a verifier"),
    ],
)
def test_a_domain_that_cannot_be_graded_is_refused(entry: Any, message: str):
    with pytest.raises(SettingsError, match=message):
        by_domain({"a": entry})
