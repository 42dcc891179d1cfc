"""A judge's reply becomes a number; what it is asked is the template, filled in."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from graders import grading, says
from serving import serve

from slimectl.errors import BackendError, SettingsError
from slimectl.executors.local import LocalExecutor
from slimectl.rewards import verifier
from slimectl.settings import Settings
from slimectl.stages.score import Grader, score
from slimectl.types import Sample

URL = "http://127.0.0.1:9/v1"
WORDS = {"pattern": r"\b(CORRECT|INCORRECT)\b", "values": {"CORRECT": 1, "INCORRECT": -1}}

REPLIES = [
    ({}, "Fine.\nScore: 7", 0.7),
    ({}, "**Score:** 10", 1.0),
    ({}, "SCORE: 7/10", 0.7),
    ({}, "Score: 2. No: Score: 0", 0.0),
    ({}, "<think>Score: 9</think>Score: 1", 0.1),
    ({}, "Score: 2.5", 0.25),
    ({}, "Score: 11", None),
    ({}, "Score: -1", None),
    ({}, "Score: " + "9" * 400, None),
    ({}, "I will not say.", None),
    ({}, "", None),
    ({"low": -1.0, "high": 1.0}, "Score: 0", 0.5),
    ({"low": 1.0, "high": 5.0}, "Score: 4", 0.75),
    ({"pattern": r"\[\[([\d.]+)\]\]"}, "So: [[5]]", 0.5),
    ({"pattern": r"\[\[(.*?)\]\]"}, "So: [[five]]", None),
    ({"pattern": r"\[\[(.*?)\]\]"}, "So: [[nan]]", None),
    (WORDS, "It is CORRECT", 1.0),
    (WORDS, "Not CORRECT but INCORRECT.", -1.0),
    (WORDS, "Score: 5", None),
]

SPELLINGS = [
    ("Score (0-10): 7", 7), ("Score [0-10]: 7", 7), ("**Score (0–10):** 7", 7), ("**Score** (0-10): **7**", 7),
    ("Rating [1-5]: 4", None), ("Rating [1-10]: 4", 4), ("score=7", 7),
    ("Score: 7/10", 7), ("Score: 7 out of 10", 7), ("7/10", 7),
    ("**7/10**", 7), ("Score = 7", 7), ("Score (out of 10): 7", 7), ("Score (max 10): 7", 7),
    ("Score out of 10: 7", 7), ("Score (0 to 10): 7", 7), ("Score from 0 to 10: 7", 7),
    ("Score on a scale of 0 to 10: 7", 7), ("Score (from 0 (wrong) to 10): 7", 7),
    ("Score (1-10, higher is better): 7.5", 7.5), ("Score is 7", 7), ("score of 7", 7), ("a score of 7 out of 10", 7),
    ("The score is: 7", 7), ("Final score: 7", 7), ("Overall Score — 7", 7), ("Score：7", 7), ('{"score": 7}', 7),
    ('{"score": "7"}', 7), ("<score>7</score>", 7), ("Score:\n7", 7), ("| Score | 7 |", 7), (r"Score: \boxed{7}", 7),
    ("Score: **7**/10", 7), ("Score: 7.", 7), ("Score: 7, good", 7), ("Score: 7,5", 7.5), ("Score: 10/10", 10),
    ("Score: 0", 0), ("Score: 10", 10), ("SCORE - 7", 7), ("Score – 7", 7), ("Rating: 8", 8), ("Grade: 9", 9),
    ("[[Rating: 5]]", 5), ("Score: 7 (scale 0-10)", 7), ("Score: 7. The score ranges from 0 to 10.", 7),
    ("Score: 7\nThe score (0-10) reflects quality.", 7), ("Score (7)", 7), ("Score [7]", 7), ("Score: [7]", 7),
    ("Score: (7)", 7), ("Score: 7 / 10", 7), ("Score: 07", 7), ("Score (0-10)", None), ("Score: 0-10", None),
    ("Score: 7-8", None), ("Score: 4/5", None), ("3/4", None), ("Score: 85/100", None),
    ("Score (0-10): unclear", None), ("Score 0 to 10", None), ("Score: 70%", None), ("Score: N", None),
    ("Scores vary", None), ("scored 3 goals", None), ("<think>Score: 9", None),
    ("<thinking>Score: 9</thinking>Score: 1", 1), ("Underscore 7", None), ("Score: ten", None),
    ("Score: −1", None), ("Score: 1e1", None),
    ("final_score: 7", 7), ("total_score = 7", 7), ("Score (from 0 (wrong) to 10): 7", 7),
]  # fmt: skip
"""(reply, the score that a person reads in it from 0 to 10, or None)."""


@pytest.mark.parametrize(("reply", "score"), SPELLINGS)
def test_the_score_as_judges_spell_it(reply, score):
    assert verifier("judge", url=URL).read(reply) == (None if score is None else pytest.approx(score / 10))


def test_a_judge_reads_what_follows_the_thought():
    sample = Sample(response="<think>7?</think>\n42", label="42")
    with grading(lambda body: says("Score: 10")) as server:
        assert verifier("judge", url=server.url, template="{response}")(sample) == 1.0
        assert verifier("judge", url=server.url, template="{whole_response}")(sample) == 1.0
        cut = Sample(response="<think>42")
        grade = verifier("judge", url=server.url, template="{response}", values={"YES": 1, "NO": -1}).explain(cut)
        assert (grade.reward, grade.extracted) == (-1.0, None)
    asked = [entry["body"]["messages"][0]["content"] for entry in server.bodies]
    assert asked == ["42", "<think>7?</think>\n42"]


@pytest.mark.parametrize(("options", "reply", "reward"), REPLIES)
def test_the_score_in_a_reply(options, reply, reward):
    judge = verifier("judge", url=URL, default_score=-0.5, **options)
    assert judge.read(reply) == (None if reward is None else pytest.approx(reward))
    with grading(lambda body: says(reply)) as server:
        there = verifier("judge", url=f"{server.url}/v1", default_score=-0.5, **options)
        assert there(Sample(response="x")) == (-0.5 if reward is None else pytest.approx(reward))
    low, high = judge.bounds
    assert reward is None or low <= reward <= high
    assert pickle.loads(pickle.dumps(judge)) == judge


def test_a_long_reply_takes_no_square_of_its_length():
    judge = verifier("judge", url=URL, pattern=r"\[\[(.*?)\]\]")
    started = time.process_time()
    assert judge.read("[" * 500_000) is None
    assert judge.read("x" * 500_000 + "[[5]]") == 0.5
    assert time.process_time() - started < 2


def test_what_is_asked():
    with grading(lambda body: says("Score: 5")) as server:
        judge = verifier("judge", url=f"{server.url}/v1/", model="m", template="{prompt}|{label}|{response}|{other}",
                         max_tokens=9, body={"top_p": 0.5})  # fmt: skip
        chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
        assert judge(Sample(prompt=chat, response="{label} {prompt}", label=7)) == 0.5
    assert server.bodies == [
        {
            "path": "/v1/chat/completions",
            "body": {
                "model": "m",
                "messages": [{"role": "user", "content": "system: s\n\nuser: q|7|{label} {prompt}|{other}"}],
                "temperature": 0.0,
                "max_tokens": 9,
                "top_p": 0.5,
            },
        }
    ]
    assert "Authorization" not in server.headers


def test_the_key_comes_from_the_environment_that_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    with grading(lambda body: says("Score: 5")) as server:
        verifier("judge", url=server.url, api_key_env="JUDGE_KEY")(Sample(response="x"))
    assert server.headers["Authorization"] == "Bearer sesame"


def test_a_reply_without_a_score_is_asked_for_again():
    replies = ["Hm.", "Score: 99", "Score: 4", "Score: 9"]
    with grading(lambda body: says(replies.pop(0))) as server:
        assert verifier("judge", url=server.url, max_attempts=3)(Sample(response="x")) == pytest.approx(0.4)
    assert replies == ["Score: 9"]


@pytest.mark.parametrize("rm_type", ["judge", "boxed_judge"])
def test_explanations_quote_the_judge(rm_type):
    sample = Sample(response=r"so \boxed{42}", label="42")
    with grading(lambda body: says("Right.\nScore: 10")) as server:
        settings = Settings.model_validate({"score": {"rm_type": rm_type, "rm_url": server.url, "explain": True}})
        list(score([sample], Grader(settings), settings.score, executor=LocalExecutor()))
    told = sample.metadata["explanation"]
    assert sample.reward == 1.0
    assert told["why"] == "the judge says 'Right.\\nScore: 10'"
    assert sample.response[slice(*told["span"])] == told["extracted"] == {"judge": sample.response}.get(rm_type, "42")


def test_no_box_is_not_asked_about():
    with grading(lambda body: says("Score: 10")) as server:
        assert verifier("boxed_judge", url=server.url)(Sample(response="42")) == 0.0
    assert server.bodies == []


def test_another_kind_of_server_is_named():
    from aiohttp import web

    with (
        grading(lambda body: web.json_response({"score": 1.0})) as server,
        pytest.raises(BackendError, match=r"the judge at http.*Is it OpenAI-compatible, with /v1 in its url\?"),
    ):
        verifier("judge", url=server.url)(Sample(response="x"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "("}, r"pattern: '\(' is not a regular expression"),
        ({"pattern": "score"}, "has 0 groups. One must capture the score"),
        ({"template": "{prompt}"}, r"template: has no \{response\}"),
        ({"low": 5.0, "high": 5.0}, "low: 5 is not below"),
        ({"values": {"A": "good"}}, "values: not every value is a finite number"),
        ({"values": 3}, "values: 3 has the wrong type"),
        ({"max_attempts": 0}, "above 0"),
    ],
)
def test_a_judge_that_cannot_be_is_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        verifier("judge", url=URL, **options)


@pytest.fixture(scope="module")
def served(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = serve(model_dir("llama"), tmp_path_factory.mktemp("judge"), weight_version="0")
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.mark.slow
def test_slimectl_serve_is_a_judge(served: str):
    settings = Settings.model_validate(
        {"score": {"rm_type": "judge", "rm_url": f"{served}/v1", "explain": True,
                   "rm_options": {"default_score": 0.25, "max_tokens": 8, "template": "Grade: {response}"}}}
    )  # fmt: skip
    samples = [Sample(index=i, response=str(i)) for i in range(16)]
    scored = list(score(samples, Grader(settings), settings.score, executor=LocalExecutor()))
    # Random weights write no score, but they answer.
    assert [sample.reward for sample in scored] == [0.25] * 16
    assert all("the judge says" in sample.metadata["explanation"]["why"] for sample in scored)
