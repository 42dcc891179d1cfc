"""A rubric's verdicts become points, by hand: what is asked, what is read, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from graders import grading, says

from slimectl.errors import BackendError, RecordError, SettingsError
from slimectl.executors.local import LocalExecutor
from slimectl.rewards import verifier
from slimectl.settings import Settings
from slimectl.stages.score import Grader, score
from slimectl.types import Sample

URL = "http://127.0.0.1:9/v1"
RIVER = [
    {"criterion": "Names the Rhine", "points": 7, "tags": ["axis:accuracy"]},
    {"criterion": "Gives its length in km", "points": 3},
    {"title": "Invents a city", "description": "Names a city that does not exist", "weight": -4},
]
NAMES = ["Names the Rhine", "Gives its length in km", "Invents a city"]


def by_text(verdicts: dict[str, str]) -> Any:
    """A judge that answers a request by the text that its question contains."""

    def answer(body: Any) -> Any:
        question = body["messages"][0]["content"]
        return says(next(reply for text, reply in verdicts.items() if text in question))

    return answer


@pytest.mark.parametrize(
    ("verdicts", "reward"),
    [
        (("yes", "yes", "no"), 1.0),  # 10 of 10
        (("yes", "no", "yes"), 0.3),  # 7 - 4 of 10
        (("no", "yes", "yes"), 0.0),  # 3 - 4 of 10, clipped
        (("yes", "no", "no"), 0.7),
    ],
)
def test_the_score_is_points_over_possible_points(verdicts: tuple[str, ...], reward: float):
    texts = ("Names the Rhine", "length in km", "a city that does not exist")
    replies = {text: f"Because.\nMet: {verdict}" for text, verdict in zip(texts, verdicts, strict=True)}
    sample = Sample(prompt="Which river?", response="The Rhine", metadata={"rubric": RIVER})
    with grading(by_text(replies)) as server:
        grade = verifier("rubric", url=server.url).explain(sample)
    numbers = [float(verdict == "yes") for verdict in verdicts]
    assert grade.reward == {"score": pytest.approx(reward), **dict(zip(NAMES, numbers, strict=True))}
    assert len(server.bodies) == 3  # one request for each criterion
    assert grade.why.split("; ")[2].startswith(f"-4 x Invents a city {numbers[2]:g} (the judge says ")
    assert (grade.extracted, grade.span) == ("The Rhine", (0, 9))


def test_the_points_are_those_of_healthbench():
    # The example of HealthBench's own tests: 7 + 10 - 6 of 7 + 5 + 10.
    criteria = [{"criterion": name, "points": points} for name, points in zip("abcd", (7, 5, 10, -6), strict=True)]
    with grading(lambda body: says("Met 1: yes Met 2: no Met 3: yes Met 4: yes")) as server:
        rubric = verifier("rubric", url=server.url, criteria=criteria, mode="together")
        assert rubric(Sample(response="x")) == {"score": 0.5, "a": 1.0, "b": 0.0, "c": 1.0, "d": 1.0}


def test_all_criteria_in_one_request():
    reply = "It does. Met 1: yes. Not in km. **Met 2:** no\n- none, met 3: No"
    sample = Sample(prompt="Which river?", response="The Rhine", extra={"rubric": RIVER})
    with grading(lambda body: says(reply)) as server:
        grade = verifier("rubric", url=server.url, mode="together").explain(sample)
    assert grade.reward == {"score": 0.7, **dict(zip(NAMES, (1.0, 0.0, 0.0), strict=True))}
    (body,) = server.bodies
    listed = "Criterion 2: Gives its length in km\nCriterion 3: Names a city that does not exist\n\n"
    assert listed in body["body"]["messages"][0]["content"]


def test_criteria_of_the_options_come_before_those_of_the_row():
    rubric = verifier("rubric", url=URL, criteria=["Is polite", "Is polite"], column="checks")
    sample = Sample(metadata={"checks": [{"criterion": "x" * 60, "weight": 2}, {"title": "score", "description": "s"}]})
    found = [(criterion.name, criterion.points) for criterion in rubric.criteria_of(sample)]
    assert found == [("Is polite", 1.0), ("Is polite 2", 1.0), ("x" * 39 + "…", 2.0), ("score 2", 1.0)]
    assert len(rubric.criteria_of(Sample())) == 2
    assert pickle.loads(pickle.dumps(rubric)) == rubric
    assert rubric.bounds == (0.0, 1.0)


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("Met: yes", 1.0), ("Met: no", 0.0), ("**Met:** Yes.", 1.0), ("no\nMet: yes", 1.0), ("Met: yes\nMet: no", 0.0),
        ('{"explanation": "met", "criteria_met": true}', 1.0), ('{"criteria_met": false}', 0.0), ("met = TRUE", 1.0),
        ("<think>Met: yes</think>Met: no", 0.0), ("<think>Met: yes", None), ("Met: unclear", None), ("yes", None),
        ("unmet: yes", None), ("Met: nothing", None), ("", None),
    ],
)  # fmt: skip
def test_the_verdict_in_a_reply(reply: str, verdict: float | None):
    assert verifier("rubric", url=URL).read(reply) == verdict


@pytest.mark.parametrize(("mode", "first", "second"), [("each", "Hm.", "Met: yes"), ("together", "Hm.", "Met 1: yes")])
def test_a_reply_without_a_verdict_is_asked_for_again_and_then_counts_as_not_met(mode: str, first: str, second: str):
    sample, criteria = Sample(response="x"), [{"criterion": "Is short", "points": 1}]
    replies = [first, second, first, first]
    with grading(lambda body: says(replies.pop(0))) as server:
        rubric = verifier("rubric", url=server.url, criteria=criteria, mode=mode, max_attempts=2)
        assert rubric(sample) == {"score": 1.0, "Is short": 1.0}
        grade = rubric.explain(sample)
    assert grade.reward == {"score": 0.0, "Is short": 0.0}
    assert "in the judge's reply" in grade.why


def test_partial_credit_by_values_of_ones_own():
    options = {"pattern": r"(?i)\bmet: (yes|partly|no)\b", "values": {"yes": 1.0, "partly": 0.5, "no": 0.0}}
    with grading(lambda body: says("Met: partly")) as server:
        rubric = verifier("rubric", url=server.url, criteria=[{"criterion": "Is short", "points": 4}], **options)
        assert rubric(Sample(response="x")) == {"score": 0.5, "Is short": 0.5}


def test_a_thought_that_never_closes_meets_nothing_and_is_not_judged():
    with grading(lambda body: says("Met: yes")) as server:
        rubric = verifier("rubric", url=server.url, criteria=["Is short"])
        assert rubric(Sample(response="<think>short")) == {"score": 0.0, "Is short": 0.0}
    assert server.bodies == []


def test_the_explanation_keeps_every_verdict_and_the_reward_every_component():
    settings = {"rm_type": "rubric", "explain": True, "rm_options": {"criteria": ["Is short", "Is kind"]}}
    replies = {"Is short": "Met: yes", "Is kind": "Met: no"}
    samples = [Sample(index=i, response="x") for i in range(3)]
    with grading(by_text(replies)) as server:
        given = Settings.model_validate({"score": {**settings, "rm_url": server.url}})
        list(score(samples, Grader(given), given.score, executor=LocalExecutor()))
    assert [sample.reward for sample in samples] == [{"score": 0.5, "Is short": 1.0, "Is kind": 0.0}] * 3
    why = samples[0].metadata["explanation"]["why"]
    assert why == "1 x Is short 1 (the judge says 'Met: yes'); 1 x Is kind 0 (the judge says 'Met: no')"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "sample 5: rubric: missing, and score.rm_options has no criteria"),
        ({"rubric": "short"}, "sample 5: rubric: 'short' is not a list of criteria"),
        ({"rubric": [{"points": 1}]}, r"sample 5: rubric\[0\]: .* has no text"),
        ({"rubric": [{"criterion": "a", "points": "7"}]}, r"sample 5: rubric\[0\].points: '7' is not a finite number"),
        ({"rubric": [{"criterion": "a", "points": -1}]}, "sample 5: rubric: no criterion has points above 0"),
        ({"rubric": []}, "no criterion has points above 0"),
    ],
)
def test_a_rubric_that_cannot_be_is_named_with_its_sample(metadata: dict[str, Any], message: str):
    with pytest.raises(RecordError, match=message) as caught:
        verifier("rubric", url=URL)(Sample(index=5, response="x", metadata=metadata))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"criteria": [{"weight": 2}]}, r"score.rm_options.criteria\[0\]: .* has no text"),
        ({"criteria": "short"}, "criteria: 'short' has the wrong type"),
        ({"template": "{response}"}, r"template: has no \{criterion\}, which mode each needs"),
        ({"template": "{response} {criterion}", "mode": "together"}, r"has no \{criteria\}"),
        ({"mode": "all"}, "'all' is not a mode"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message):
        verifier("rubric", url=URL, **options)


def test_a_server_that_fails_ends_the_scoring_as_for_a_judge():
    from aiohttp import web

    with (
        grading(lambda body: web.json_response({"error": "no"}, status=400)) as server,
        pytest.raises(BackendError, match="the judge at"),
    ):
        verifier("rubric", url=server.url, criteria=["a", "b"])(Sample(response="x"))
