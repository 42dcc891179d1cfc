"""A reward is tried before a run depends on it: one finding for each way to be unfit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from slimectl.executors.local import LocalExecutor
from slimectl.settings import Settings
from slimectl.settings.score import ScoreSettings
from slimectl.stages.check_reward import check_reward
from slimectl.stages.score import Grader
from slimectl.types import Sample

CALLS = itertools.count()


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    made = LocalExecutor()
    yield made
    made.close()


def parity(sample: Sample) -> float:
    return float(sample.index % 2)


def constant(sample: Sample) -> float:
    return 1.0


def nan_once(sample: Sample) -> float:
    return float("nan") if sample.index == 2 else float(sample.index % 2)


def words(sample: Sample) -> object:
    return "good" if sample.index == 3 else {"acc": 1.0}


def raising(sample: Sample) -> float:
    return 1 / sample.index


def failing(sample: Sample) -> float:
    return 1 / 0


def counting(sample: Sample) -> float:
    return float(next(CALLS))


def slow(sample: Sample) -> float:
    time.sleep(0.4 if sample.index == 1 else 0.0)
    return float(sample.index % 2)


def stuck(sample: Sample) -> float:
    while sample.index == 1:
        pass
    return float(sample.index % 2)


SAMPLES = [Sample(index=index, group_index=index // 2) for index in range(6)]


def findings(
    executor: LocalExecutor, reward, samples=SAMPLES, bounds=lambda sample: None, **settings
) -> dict[str, str]:
    found = check_reward(samples, reward, ScoreSettings(workers=1, **settings), executor=executor, bounds=bounds)
    return {finding.check: str(finding) for finding in found}


def test_a_fit_reward_passes_every_check(executor: LocalExecutor):
    found = findings(executor, parity)
    time_line = found.pop("time")
    assert list(found.values()) == [
        "ok    errors       6 samples graded",
        "ok    type         6 finite numbers",
        "ok    range        0 to 1, mean 0.5",
        "ok    determinism  the same reward twice",
        "ok    variance     3 of 3 groups have different rewards (mean deviation 0.5)",
    ]
    assert time_line.startswith("ok    time")
    assert time_line.endswith("limit 5 s), 1 worker")


@pytest.mark.parametrize(
    ("reward", "check", "line"),
    [
        (nan_once, "type", "1 sample, the first is sample 2: reward of sample 2 is nan, not a finite number"),
        (
            words,
            "type",
            "6 samples, the first is sample 0: score.reward_key: not set, and no 'score' is in the reward of sample 0 "
            "(acc). Set it to one of them",
        ),
        (raising, "errors", "1 sample, the first is sample 0: ZeroDivisionError: division by zero"),
        (counting, "determinism", "6 samples, the first is sample 0: 0.0, then 1.0"),
        (constant, "variance", "0 of 3 groups have different rewards (mean deviation 0), so group-relative advantages"),
    ],
)
def test_what_makes_a_reward_unfit(executor: LocalExecutor, reward, check, line):
    found = findings(executor, reward)
    assert found[check].startswith(f"FAIL  {check:<12} {line}")


def test_a_reward_that_always_fails_passes_no_check_of_its_results(executor: LocalExecutor):
    found = findings(executor, failing)
    for check in ("type", "determinism", "time"):
        assert found[check] == f"FAIL  {check:<12} no call completed"
    assert found["errors"].startswith("FAIL  errors       6 samples, the first is sample 0: ZeroDivisionError")


@pytest.mark.slow
def test_a_slow_sample_and_one_that_hangs(executor: LocalExecutor):
    for reward, cpu_s, clock_s in ((slow, 5.0, 0.3), (stuck, 0.3, 9.0)):
        found = findings(executor, reward, timeout_s=cpu_s, wall_timeout_s=clock_s)
        words = f"took more than {cpu_s:g} s of CPU time or {clock_s:g} s of wall time, the first is sample 1"
        assert found["time"] == f"FAIL  time         1 sample {words}"
        assert found["type"] == "ok    type         5 finite numbers"


def test_a_number_outside_the_bounds_of_its_verifier(executor: LocalExecutor):
    assert findings(executor, parity, bounds=lambda sample: (0.0, 1.0))["range"].startswith("ok")
    found = findings(executor, parity, bounds=lambda sample: (-1.0, 0.0))
    assert found["range"] == "FAIL  range        sample 1: 1 is not between -1 and 0"


def test_groups_of_one_have_nothing_to_compare(executor: LocalExecutor):
    alone = [Sample(index=index, group_index=index) for index in range(3)]
    assert findings(executor, constant, alone)["variance"].startswith("ok    variance     no group has two samples")


def test_a_verifier_knows_its_bounds_and_explanations_change_nothing(executor: LocalExecutor):
    answers = [Sample(index=i, group_index=0, response=f"Answer: {i}", label="1") for i in range(2)]
    grader = Grader(Settings.model_validate({"score": {"rm_type": "dapo", "explain": True}}))
    assert grader.bounds(answers[0]) == (-1.0, 1.0)
    found = findings(executor, grader, answers, bounds=grader.bounds)
    assert found["range"] == "ok    range        -1 to 1, mean 0"
    acc = Grader(Settings.model_validate({"score": {"rm_type": "dapo", "reward_key": "acc"}}))
    assert acc.bounds(answers[0]) is None
