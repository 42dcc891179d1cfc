"""Reward functions of the user: several in a sum, without an opinion, and passed in from Python in every shape."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import slimectl
from slimectl.errors import HookError, SlimectlError
from slimectl.rewards.text import Exact
from slimectl.runtime import builders
from slimectl.runtime.preflight import _named
from slimectl.settings import Settings
from slimectl.stages.check_reward import check_reward
from slimectl.stages.filters import nonzero_std
from slimectl.stages.score import report_grading
from slimectl.types import Sample, Status

OWN = """
import asyncio

CALLS = []

def accuracy(completions, answer, **kwargs):
    CALLS.append(len(completions))
    return [float(completion == word) for completion, word in zip(completions, answer)]

def only_numbers(prompts, completions, **kwargs):
    return [float(completion == "4") if completion.isdigit() else None for completion in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

async def waits(sample):
    await asyncio.sleep(0)
    return len(sample.response) / 10

def runs_a_loop(sample):
    async def half():
        return 0.5
    return asyncio.run(half())

def spread(samples):
    CALLS.append([sample.index for sample in samples])
    mean = sum(len(sample.response) for sample in samples) / len(samples)
    return [len(sample.response) - mean for sample in samples]

def plain(sample):
    return 1

def none(sample):
    return None

def of_dict(sample):
    return {"score": None if sample.response == "four" else 1.0}

def raises(sample):
    raise ValueError("no such word")
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "other.py").write_text("def plain(sample): return 2\ndef score(sample): return 3\n")
    return f"{tmp_path}/own.py"


def answers(*responses: str, group: int | None = None) -> list[Sample]:
    return [
        Sample(i if group is None else group, i, prompt="2+2=", response=response, label="4", status=Status.COMPLETED)
        for i, response in enumerate(responses)
    ]


def settings(**score: Any) -> Settings:
    return Settings.model_validate({"score": score})


def graded(given: list[Sample], **score: Any) -> list[Any]:
    return [sample.reward for sample in slimectl.score(given, settings(**score))]


def parts(own: str, *names: str, **more: Any) -> list[dict[str, Any]]:
    return [{"path": f"{own}:{name}", **more} for name in names]


def test_own_functions_and_verifiers_are_summed_with_their_weights(own: str):
    rm = [*parts(own, "accuracy", weight=0.2), {"type": "exact"}, *parts(own, "waits", name="length", weight=-1.0)]
    # By hand: 0.2 x 1 + 1 - 1 x 0.1; 0 + 0 - 1 x 0.4
    assert graded(answers("4", "four"), rm=rm) == [
        pytest.approx({"score": 1.1, "accuracy": 1.0, "exact": 1.0, "length": 0.1}),
        pytest.approx({"score": -0.4, "accuracy": 0.0, "exact": 0.0, "length": 0.4}),
    ]


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("accuracy", [1.0, 0.0]),
        ("compute_score", [1.0, 0.0]),
        ("waits", [0.1, 0.4]),
        ("runs_a_loop", [0.5, 0.5]),
        ("spread", [-1.5, 1.5]),  # lengths 1 and 4
        ("plain", [1.0, 1.0]),
    ],
)
@pytest.mark.parametrize("beside", ["plain", "waits"], ids=["in order", "in an event loop"])
def test_every_shape_of_function_is_a_part(own: str, name: str, beside: str, rewards: list[float]):
    rm = [*parts(own, name, weight=2.0), *parts(own, beside, name="beside", weight=0.0)]
    assert [each["score"] for each in graded(answers("4", "four"), rm=rm, workers=0)] == pytest.approx(
        [2 * reward for reward in rewards]
    )


def test_worker_processes_load_the_functions_of_a_sum(own: str):
    rm = [*parts(own, "accuracy", "waits", "spread", "compute_score"), {"type": "math"}]
    given = slimectl.score(answers("4", "four", group=0), settings(rm=rm, workers=1, group_rm=True))
    # By hand: 1 + 0.1 - 1.5 + 1 + 0 (no box); 0 + 0.4 + 1.5 + 0 + 0
    assert [sample.reward["score"] for sample in given] == pytest.approx([0.6, 1.9])


def test_a_key_selects_a_number_of_a_part_and_the_explanation_has_every_part(own: str):
    rm = [*parts(own, "compute_score", key="length"), {"type": "exact", "weight": 2}]
    (sample,) = slimectl.score(answers("4"), settings(rm=rm, explain=True))
    assert sample.reward == {"score": 3.0, "compute_score": 1.0, "exact": 1.0}
    assert sample.metadata["explanation"]["why"] == (
        f"1 x compute_score 1 ({own}:compute_score returned {{'score': 1.0, 'length': 1}}); "
        "2 x exact 1 (is the label '4')"
    )


def test_a_sum_tells_the_answer_of_its_first_verifier(own: str):
    rm = [*parts(own, "plain"), {"type": "math"}]
    grader = builders.reward(settings(rm=rm, explain=True))
    (sample,) = slimectl.score(answers(r"\boxed{4}"), settings(rm=rm, explain=True))
    explanation = sample.metadata["explanation"]
    assert (explanation["extracted"], explanation["span"], explanation["from"]) == ("4", [7, 8], r"last \boxed{}")
    assert grader.verifier_of(sample).extract(sample) == "4"


def test_a_function_of_many_gets_batches_and_with_group_rm_all_siblings(own: str):
    calls = builders.reward(settings(rm=parts(own, "spread"))).verifier_of(Sample()).parts[0].verifier
    seen = calls.function._hook.function.__globals__["CALLS"]
    seen.clear()
    rm = [*parts(own, "spread"), {"type": "exact", "weight": 0.5}]
    graded(answers("4", "four", "5", "6"), rm=rm, batch_size=3, workers=0)
    assert seen == [[0, 1, 2], [3]]
    seen.clear()
    siblings = [*answers("4", "four", "5", group=0), *answers("6", group=1)]
    assert [each["score"] for each in graded(siblings, rm=rm, batch_size=2, group_rm=True)] == [-0.5, 2.0, -1.0, 0.0]
    assert seen == [[0, 1, 2], [0]]


def test_functions_of_one_name_are_named_by_their_path(own: str):
    other = own.replace("own.py", "other.py")
    rm = [*parts(own, "plain"), *parts(other, "plain"), *parts(other, "score"), *parts(other, "score", name="third")]
    assert graded(answers("4"), rm=rm) == [
        {"score": 9.0, f"{own}:plain": 1, f"{other}:plain": 2, f"{other}:score": 3, "third": 3}
    ]
    assert _named(settings(rm=rm).score).endswith(f"1 x {other}:score")


@pytest.mark.parametrize(
    ("rm", "message"),
    [
        ([{"path": "{own}:plian"}], r"score\.rm\[0\]\.path: .*own\.py has no such name: plian"),
        ([{"type": "exact"}, {"path": "gone.py:f"}], r"score\.rm\[1\]\.path: gone\.py: no such file"),
        ([{"path": "{own}:plain"}, {"path": "{own}:plain"}], r"score\.rm\[1\]\.name: '.*own\.py:plain' is taken"),
        ([{"path": "{own}:plain", "limit": 3}], r"score\.rm\[0\]\.limit: your own function has no options"),
        ([{"path": 3}], r"score\.rm\[0\]\.path: 3 is not a path\. Write file\.py:name"),
        ([{"type": "{own}:plain"}], r"For your own function write path = '.*own\.py:plain' instead of type"),
        ([{"weight": 2}], r"score\.rm\[0\]\.type: missing\. Name a verifier .*path = 'file\.py:name'"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_before_anything_is_graded(
    own: str, rm: list[dict[str, Any]], message: str
):
    filled = [{key: value.format(own=own) if isinstance(value, str) else value for key, value in part.items()}
              for part in rm]  # fmt: skip
    with pytest.raises(SlimectlError, match=message):
        builders.reward(settings(rm=filled))


def test_an_error_of_a_part_names_its_setting_and_line(own: str):
    line = OWN.splitlines().index('    raise ValueError("no such word")') + 1
    with pytest.raises(
        HookError,
        match=rf"sample 0: score\.rm\[1\]\.path: .*:raises raised ValueError: no such word \(own\.py:{line}\)",
    ):
        graded(answers("4"), rm=[{"type": "exact"}, *parts(own, "raises")])


# --- None is no opinion ----------------------------------------------------------------------------------------------


def test_none_is_left_out_of_a_sum_as_trl_does(own: str):
    """TRL takes the nansum of weight times reward over the functions."""
    rm = [*parts(own, "accuracy", weight=0.2), *parts(own, "only_numbers", weight=2.0), *parts(own, "none")]
    assert graded(answers("4", "four"), rm=rm, none_reward="skip") == [
        {"score": 2.2, "accuracy": 1.0, "only_numbers": 1.0, "none": None},
        {"score": 0.0, "accuracy": 0.0, "only_numbers": None, "none": None},
    ]
    with pytest.raises(HookError, match=r"reward of sample 1 is None, not a finite number\. .*score\.none_reward"):
        graded(answers("4", "four"), rm=rm)


@pytest.mark.parametrize("name", ["only_numbers", "of_dict"])
def test_a_sample_on_which_no_function_has_an_opinion_has_no_reward(own: str, name: str):
    by_path = {"custom_rm_path": f"{own}:{name}"}
    for score in (by_path, {"rm": parts(own, name)}, {"rm": parts(own, name), "explain": True}):
        first, second = slimectl.score(answers("4", "four"), settings(**score, none_reward="skip"))
        assert (first.has_no_reward, second.has_no_reward, second.reward) == (False, True, None)
        assert second.metadata["no_reward"].endswith("returned None")
        with pytest.raises(HookError, match=r"sample 1|no number under"):
            graded(answers("4", "four"), **score)
    (again,) = slimectl.score([second], settings(rm_type="exact"))
    assert (again.reward, again.metadata.get("no_reward")) == (0.0, None)


def test_samples_without_a_reward_are_told_checked_and_not_compared(own: str, caplog: pytest.LogCaptureFixture):
    chosen = settings(custom_rm_path=f"{own}:only_numbers", none_reward="skip")
    given = list(slimectl.score(answers("4", "four", "4", group=0), chosen))
    report_grading(given, chosen.score, "round 3")
    assert caplog.messages == [
        "round 3: 1 of 3 samples have no reward: every reward function returned None, the first time for sample 1"
    ]
    assert nonzero_std(chosen, given) == (False, "zero_std_1.0")
    executor = builders.executor(chosen, trains=False)
    found = {each.check: each for each in check_reward(given, builders.reward(chosen), chosen.score, executor=executor)}
    executor.close()
    assert (found["type"].fine, found["type"].text) == (True, "2 finite numbers, 1 without a reward")


# --- functions from Python -------------------------------------------------------------------------------------------


async def waits(sample: Sample) -> float:
    await asyncio.sleep(0)
    return float(len(sample.response))


async def many(samples: list[Sample]) -> list[float]:
    return [float(len(sample.response)) for sample in samples]


def trl(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    assert columns["label"] == ["4"] * len(prompts)
    return [float(len(completion)) for completion in completions]


async def trl_async(completions: list[str], **columns: list[Any]) -> list[float]:
    return trl(completions=completions, prompts=columns.pop("prompts"), **columns)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(len(solution_str)) if ground_truth == "4" else -1.0


class Callable_:
    async def __call__(self, sample: Sample) -> float:
        return float(len(sample.response))


@pytest.mark.parametrize(
    "function",
    [
        lambda sample: len(sample.response),
        lambda anything: len(anything.response),
        lambda anything, scale=1: scale * len(anything.response),
        lambda *values: len(values[0].response),
        lambda samples: [len(sample.response) for sample in samples],
        lambda prompt, completion: len(completion),
        lambda args, sample: len(sample.response) / args.score.batch_size * 64,
        waits, many, trl, trl_async, compute_score, Callable_(),
    ],
)  # fmt: skip
def test_a_function_from_python_has_every_shape_that_one_by_path_has(function: Callable[..., Any]):
    given = answers("4", "four", "44")
    assert [sample.reward for sample in slimectl.score(given, Settings(), reward=function)] == [1, 4, 2]


def test_a_function_from_python_goes_before_all_else_and_gets_groups():
    sizes = lambda samples: [float(len(samples))] * len(samples)  # noqa: E731
    chosen = settings(rm_type="math", group_rm=True)
    given = [*answers("4", "5", group=0), *answers("6", group=1)]
    given[0].metadata["rm_type"] = "exact"
    assert [sample.reward for sample in slimectl.score(given, chosen, reward=sizes)] == [2.0, 2.0, 1.0]
    assert [sample.reward for sample in slimectl.score(answers("4"), chosen, reward=Exact())] == [1.0]


def test_a_function_from_python_that_does_not_fit_is_named():
    def wants_more(first: Any, second: Any) -> float:
        return 0.0

    with pytest.raises(
        HookError,
        match=r"reward: .*wants_more asks for first, second. Functions of this setting can ask for args",
    ):
        list(slimectl.score(answers("4"), Settings(), reward=wants_more))


def test_a_failed_reward_leaves_nothing_in_the_sample():
    async def says(sample: Sample) -> str:
        return "good"

    samples = answers("4", "5")
    samples[0].reward = 0.25
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a coroutine that was never awaited
        for function in (says, lambda sample: says):
            with pytest.raises(
                HookError, match=r"reward: .* sample 0 is .*, not a finite number\. Fix the reward function"
            ):
                list(slimectl.score(samples, Settings(), reward=function))
    assert [sample.reward for sample in samples] == [0.25, None]
