"""No response makes a verifier raise, stall, or give anything but a number within its bounds.

A sample of the corpus runs here; all of it by benchmarks/hostile.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from graders import grading, says
from hostile import EXPLOSIVE, LABELS, LONG, MARKUP, SIGNS, responses
from hypothesis import given, settings
from hypothesis import strategies as st
from sandboxes import refusal
from trials import STUCK_S, TIMEOUT_S, TRIALS, answered, ran, sample_of, tried, warm_up

from slimectl.executors.local import LocalExecutor
from slimectl.rewards import known_types
from slimectl.settings import Settings
from slimectl.stages.score import Grader, score

COUNT = 150


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    made = LocalExecutor()
    list(made.map(warm_up, range(8), workers=2))
    yield made
    made.close()


@pytest.mark.slow
def test_no_hostile_response_raises_or_overruns(executor: LocalExecutor):
    pairs = [
        *((f"\\boxed{{{text}}}", label) for text in EXPLOSIVE for label in (LABELS[0], text)),
        *((text, "5") for text in MARKUP + SIGNS + LONG),
        *responses(COUNT, seed=1),
    ]
    # Making a task of reasoning-gym for each costs more than all the rest; below it gets texts enough.
    fn = partial(tried, without="reasoning_gym")
    for pair, result in zip(pairs, executor.map(fn, pairs, workers=2, timeout_s=STUCK_S), strict=True):
        assert isinstance(result, dict), f"{result!r} for {pair!r}"
        assert max(result.values()) < TIMEOUT_S, (max(result, key=lambda name: result[name]), pair)


def test_every_verifier_is_tried():
    tried_ones = {name.removeprefix("boxed_") for name in TRIALS}
    # A coin, servers (below), a model: its own tests.
    elsewhere = {"random", "remote_rm", "reward_model", "rubric"}
    assert set(known_types()) - tried_ones <= elsewhere


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "reasoning_gym" else ())
        for name in TRIALS
        if not name.startswith("boxed_")
    ],
)
@settings(max_examples=40, deadline=None)
@given(
    text=st.text(st.characters(codec=None), max_size=80), around=st.sampled_from(["{}", "\\boxed{{{}}}", "Answer: {}"])
)
def test_no_text_at_all_raises(name: str, text: str, around: str):
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    TRIALS[name](around.format(text), "5")


@pytest.mark.slow
def test_no_hostile_response_or_reply_breaks_the_judge():
    given = {"rm_type": "judge", "explain": True, "concurrency": 16}
    pairs = [*responses(COUNT, seed=4), *((f"Score: {text}", "5") for text in EXPLOSIVE)]
    with grading(lambda body: says(body["messages"][0]["content"].rpartition("|")[2])) as server:
        options = {"template": "{prompt}{label}|{response}", "default_score": 0.5}
        chosen = Settings.model_validate({"score": {**given, "rm_url": server.url, "rm_options": options}})
        samples = [sample_of(*pair) for pair in pairs]
        for sample in score(samples, Grader(chosen), chosen.score, executor=LocalExecutor()):
            assert isinstance(sample.reward, float)
            assert 0.0 <= sample.reward <= 1.0
            assert "\n" not in sample.metadata["explanation"]["why"]


def test_what_a_server_says_is_a_reward_or_a_backend_error():
    found = list(answered(COUNT, seed=2))
    assert len(found) == 4 * COUNT
    assert [pair for pair in found if isinstance(pair[1], Exception)] == []


def test_no_hostile_program_breaks_the_sandbox(executor: LocalExecutor):
    if refusal():
        pytest.skip(refusal())
    pairs = list(responses(12, seed=3))
    results = list(executor.map(ran, pairs, workers=2, timeout_s=STUCK_S))
    assert [result for result in results if not isinstance(result, dict)] == []
