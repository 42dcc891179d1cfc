"""Functions of one's own that grade many samples at once: what they get, and what they must give back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slimectl.errors import HookError, RecordError
from slimectl.executors.local import LocalExecutor
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.stages.check_reward import check_reward
from slimectl.stages.score import score
from slimectl.types import Sample, Status

FUNCTIONS = """
import asyncio
import numpy

SIZES = []

def lengths(samples):
    SIZES.append([sample.index for sample in samples])
    return [float(len(sample.response)) for sample in samples]

async def slowly(args, samples):
    SIZES.append([sample.index for sample in samples])
    await asyncio.sleep(0.1)
    return [float(sample.index) for sample in samples]

async def one_slowly(sample):
    await asyncio.sleep(0.1)
    return float(sample.index)

begun = set()

async def once_eight_have_begun(sample):
    begun.add(sample.index)
    while len(begun) < 8:
        await asyncio.sleep(0.01)
    return float(sample.index)

def ranks(settings, samples):
    ordered = sorted(len(sample.response) for sample in samples)
    return numpy.array([ordered.index(len(sample.response)) for sample in samples], dtype=numpy.float32)

def best(samples):
    return [{"acc": 1.0} for sample in samples]

def of_numpy(sample):
    return {"score": numpy.float32(0.5)}

def one(sample): return 1.0
def short(samples): return [1.0] * (len(samples) - 1)
def single(samples): return 1.0
def missing(samples): return [None for sample in samples]
def nan(samples): return [float("nan") if sample.index == 5 else 1.0 for sample in samples]
def raises(samples): raise ValueError("no such reward")
def hangs(samples):
    while samples[0].group_index == 1:
        pass
    return [1.0] * len(samples)
class Awaited:
    async def __call__(self, samples): return [0.25] * len(samples)
awaited = Awaited()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    return str(tmp_path / "own.py")


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    made = LocalExecutor()
    yield made
    made.close()


def settings_of(path: str, **given: object) -> Settings:
    return Settings.model_validate({"score": {"custom_rm_path": path, **given}})


def rewards(settings: Settings, samples: list[Sample], executor: LocalExecutor) -> list[Any]:
    return [sample.reward for sample in score(samples, builders.reward(settings), settings.score, executor=executor)]


def siblings(*sizes: int) -> list[Sample]:
    """Groups of these sizes; the response of sample i is i characters long."""
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    return [Sample(index=i, group_index=group, response="x" * i) for i, group in enumerate(groups)]


def sizes_seen(settings: Settings) -> list[list[int]]:
    from slimectl.plugins.callables import load_callable

    return load_callable(str(settings.score.custom_rm_path), setting="x").__globals__["SIZES"]


@pytest.mark.parametrize(
    ("given", "calls"),
    [
        ({"batch_size": 4}, [[0, 1, 2, 3], [4, 5, 6, 7], [8]]),
        ({}, [[0, 1, 2, 3, 4, 5, 6, 7, 8]]),
        ({"group_rm": True, "batch_size": 2}, [[0, 1, 2, 3], [4], [5, 6, 7, 8]]),
    ],
)
@pytest.mark.parametrize("name", ["lengths", "slowly"])
def test_a_function_of_samples_gets_batches_or_whole_groups(file, executor, name, given, calls):
    settings = settings_of(f"{file}:{name}", **given)
    assert rewards(settings, siblings(4, 1, 4), executor) == [float(i) for i in range(9)]
    assert sizes_seen(settings) == calls


def test_batches_are_drawn_no_further_than_asked_for(file, executor):
    pulled = []

    def source() -> Iterator[Sample]:
        for sample in siblings(1, 1, 1, 1, 1, 1):
            pulled.append(sample.index)
            yield sample

    settings = settings_of(f"{file}:lengths", batch_size=3)
    next(score(source(), builders.reward(settings), settings.score, executor=executor))
    assert pulled == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_siblings_are_compared(file, executor, workers):
    settings = settings_of(f"{file}:ranks", group_rm=True, workers=workers)
    assert rewards(settings, siblings(3, 1, 2), executor) == [0.0, 1.0, 2.0, 0.0, 0.0, 1.0]


@pytest.mark.slow
def test_async_functions_wait_side_by_side(file, executor):
    waiting = settings_of(f"{file}:once_eight_have_begun")  # one by one they would wait for ever
    assert rewards(waiting, siblings(40), executor) == [float(i) for i in range(40)]
    assert rewards(settings_of(f"{file}:awaited"), siblings(2), executor) == [0.25, 0.25]
    assert rewards(settings_of(f"{file}:one_slowly", workers=1), siblings(2), executor) == [0.0, 1.0]


def test_numbers_of_numpy_are_numbers(file, executor):
    (reward,) = rewards(settings_of(f"{file}:of_numpy"), siblings(1), executor)
    assert (reward, type(reward["score"])) == ({"score": 0.5}, float)


def test_failed_siblings_are_seen_but_get_0(file, executor):
    samples = siblings(3)
    samples[1].status = Status.FAILED
    assert rewards(settings_of(f"{file}:ranks", group_rm=True), samples, executor) == [0.0, 0.0, 2.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_nobody_is_asked_about_failed_attempts(file, executor, workers):
    samples = siblings(5)
    for at in (0, 2, 3):
        samples[at].status = Status.FAILED
    settings = settings_of(f"{file}:lengths", workers=workers)
    assert rewards(settings, samples, executor) == [0.0, 1.0, 0.0, 0.0, 4.0]
    if not workers:
        assert sizes_seen(settings) == [[1], [4]]


def test_samples_may_name_graders_of_their_own(file, executor):
    samples = siblings(2, 2)
    samples[1].custom_rm_path = f"{file}:awaited"
    samples[3].custom_rm_path = f"{file}:one_slowly"
    assert rewards(settings_of(f"{file}:lengths", allow_paths_in_records=True), samples, executor) == [
        0.0,
        0.25,
        2.0,
        3.0,
    ]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "short",
            {"batch_size": 4},
            r"samples 0 to 3: .*:short returned 3 rewards for 4 samples\. Return one for each",
        ),
        (
            "single",
            {"batch_size": 4},
            r"samples 0 to 3: .*returned float for 4 samples\. Return a list with one reward for e",
        ),
        ("missing", {}, "reward of sample 0 is None, not a finite number. Fix the reward function"),
        ("nan", {"group_rm": True}, "reward of sample 5 is nan, not a finite number"),
        ("best", {}, r"reward_key: not set, and no 'score' is in the reward of sample 0 \(acc\)\. Set it"),
        ("best", {"reward_key": "score"}, r"score\.reward_key: 'score' is not in the reward of sample 0 \(acc\)"),
        (
            "raises",
            {"batch_size": 4},
            r"samples 0 to 3: .*:raises raised ValueError: no such reward \(own\.py:\d+\)",
        ),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_no_list_of_rewards_is_refused_with_the_numbers_of_the_samples(
    file, executor, workers, name, given, message
):
    with pytest.raises(HookError, match=message):
        rewards(settings_of(f"{file}:{name}", workers=workers, **given), siblings(4, 4), executor)


def test_a_function_of_one_sample_grades_no_groups(file):
    with pytest.raises(HookError, match=r"own\.py:one: score\.group_rm needs a function that takes `samples`"):
        builders.reward(settings_of(f"{file}:one", group_rm=True))


def test_siblings_that_were_parted_are_refused(file, executor):
    samples = siblings(2, 2, 2)
    samples[4].group_index = 0
    with pytest.raises(RecordError, match="sample 4: group_index: group 0 has already been graded"):
        rewards(settings_of(f"{file}:ranks", group_rm=True), samples, executor)


def test_verifiers_grade_each_of_a_group_alone(executor):
    settings = Settings.model_validate({"score": {"rm_type": "exact", "group_rm": True}})
    samples = [Sample(index=i, group_index=0, response=str(i), label="1") for i in range(3)]
    assert [len(call) for call in builders.reward(settings).calls(samples)] == [1, 1, 1]
    assert rewards(settings, samples, executor) == [0.0, 1.0, 0.0]


@pytest.mark.slow
def test_a_group_that_hangs_costs_no_other(file, executor):
    settings = settings_of(f"{file}:hangs", group_rm=True, workers=1, timeout_s=1.0)
    samples = siblings(2, 2, 2)
    assert rewards(settings, samples, executor) == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert samples[3].metadata == {"reward_error": "took more than 1 s of CPU time"}


def test_explanations_and_checks_know_groups(file, executor):
    settings = settings_of(f"{file}:ranks", group_rm=True, explain=True)
    samples = siblings(3)
    assert rewards(settings, samples, executor) == [0.0, 1.0, 2.0]
    assert samples[2].metadata["explanation"]["why"] == f"{file}:ranks returned 2.0"
    found = {
        one.check: one for one in check_reward(samples, builders.reward(settings), settings.score, executor=executor)
    }
    assert all(one.fine for one in found.values())
    assert found["range"].text == "0 to 2, mean 1"
