"""What a sample may cost to grade: the time of a busy machine is not its own, and a round of timeouts ends the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_rounds import Slow, lengths
from test_run_stage import Bytes, settings

from slimectl.errors import SlimectlError
from slimectl.executors.local import LocalExecutor
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.settings.score import ScoreSettings
from slimectl.stages.evaluate import HeldOutDataset
from slimectl.stages.generation import GroupGenerator
from slimectl.stages.grader import Grader
from slimectl.stages.prompt_groups import PromptSource
from slimectl.stages.rounds import sampled_rounds
from slimectl.stages.score import score
from slimectl.types import Metrics, Sample, Status


class Recorded(LocalExecutor):
    """Remembers the limits and the number of items of every map."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[tuple[float | None, float | None]] = []
        self.items = 0

    def map(self, fn: Callable[..., Any], items: Any, **options: Any) -> Iterator[Any]:
        self.limits.append((options["timeout_s"], options["wall_timeout_s"]))

        def counted() -> Iterator[Any]:
            for item in items:
                self.items += 1
                yield item

        return super().map(fn, counted(), **options)


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    made = LocalExecutor()
    yield made
    made.close()


def answer(response: str, label: str, index: int = 0, **metadata: Any) -> Sample:
    return Sample(
        index=index, response=response, response_length=1, label=label, status=Status.COMPLETED, metadata=metadata
    )


def waits_for_a_core(sample: Sample) -> float:
    time.sleep(0.4)
    return 1.0


def spins_on_zero(sample: Sample) -> float:
    while sample.tokens[0] == 1:  # the first prompt
        pass
    return 1.0


def test_the_first_formula_of_a_worker_gets_its_reward_within_a_small_limit():
    """The time in which the worker imports mpmath is not the sample's."""
    chosen = Settings.model_validate({"score": {"rm_type": "math", "timeout_s": 0.6, "workers": 1}})
    fresh = LocalExecutor()
    samples = [answer(rf"\boxed{{\sqrt{{{n}}}+1}}", rf"1+\sqrt{{{n}}}", n) for n in (2, 3)]
    scored = list(score(samples, Grader(chosen), chosen.score, executor=fresh))
    fresh.close()
    assert [(sample.reward, sample.metadata) for sample in scored] == [(1.0, {}), (1.0, {})]


def test_a_reward_that_waits_for_a_core_is_the_reward(executor: LocalExecutor):
    limits = ScoreSettings(workers=2, timeout_s=0.2)
    samples = [answer("x", "", index) for index in range(4)]
    assert [sample.reward for sample in score(samples, waits_for_a_core, limits, executor=executor)] == [1.0] * 4


def test_a_verifier_that_only_a_prompt_names_has_the_limits_and_the_workers_of_any_other():
    chosen, recorded = Settings.model_validate({"score": {"rm_type": "exact"}}), Recorded()
    samples = [
        answer("4", "4", 0),
        answer(r"\boxed{\frac12}", "0.5", 1, rm_type="math"),
        answer("4", "5", 2),
        answer(r"\boxed{3}", "0.5", 3, rm_type="boxed_math"),
        answer("4", "4", 4),
    ]
    scored = list(score(samples, Grader(chosen), chosen.score, executor=recorded))
    recorded.close()
    assert [sample.reward for sample in scored] == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert recorded.limits == [(5.0, 60.0)]
    assert recorded.items == 4  # the first was graded here


def test_no_worker_is_started_where_nothing_is_slow():
    chosen, recorded = Settings.model_validate({"score": {"rm_type": "exact"}}), Recorded()
    assert [s.reward for s in score([answer("4", "4")], Grader(chosen), chosen.score, executor=recorded)] == [1.0]
    assert recorded.limits == []


OWN = """
def reward(sample):
    while sample.index == 1: pass
    return 1.0

async def waits(sample):
    return 1.0
"""


def test_a_time_limit_is_one_of_your_own_function_too(executor: LocalExecutor, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)

    def grader(name: str, **limits: float) -> tuple[Grader, ScoreSettings]:
        chosen = Settings.model_validate({"score": {"custom_rm_path": f"{tmp_path}/own.py:{name}", **limits}})
        return builders.reward(chosen), chosen.score

    made, limits = grader("reward", timeout_s=0.2)
    samples = list(score([answer("x", "", index) for index in range(3)], made, limits, executor=executor))
    assert [sample.reward for sample in samples] == [1.0, 0.0, 1.0]
    assert samples[1].metadata["reward_error"] == "took more than 0.2 s of CPU time"
    assert grader("reward", wall_timeout_s=60.0)[0].slow
    assert not grader("reward")[0].slow
    assert not grader("waits", timeout_s=0.2)[0].slow  # many wait at once in this process


def test_the_time_of_programs_is_added_to_the_limit_on_the_clock():
    # By hand: 60 s to start, ten times 4 s of CPU time, 10 s to end.
    chosen = Settings.model_validate({"score": {"rm_type": "code", "timeout_s": 1.0}})
    assert Grader(chosen).patience_s == 110.0


@pytest.mark.parametrize(("share", "rounds"), [(0.5, 2), (None, 2), (0.49, 0)])
def test_a_round_of_timeouts_is_counted_and_more_than_a_share_of_them_ends_the_run(
    executor: LocalExecutor, caplog: pytest.LogCaptureFixture, share: float | None, rounds: int
):
    chosen = settings(num_rollout=2, max_reward_timeouts=share)
    chosen = chosen.model_copy(update={"score": ScoreSettings(workers=1, timeout_s=0.2)})
    source = PromptSource(lengths(1, 1, 1, 1), GroupGenerator(Slow(), Bytes(), chosen.rollout))
    stream = sampled_rounds(source, spins_on_zero, chosen, executor=executor)
    line = r"round 1: grading 1 of 2 samples exceeded score\.timeout_s = 0\.2 s of CPU time, or 2\.4 s of wall time"
    if not rounds:
        with pytest.raises(SlimectlError, match=rf"^{line}, twice, more than run\.max_reward_timeouts = 0\.49 of them"):
            list(stream)
        return
    with caplog.at_level(logging.WARNING, logger="slimectl"):
        made = list(stream)
    assert [[sample.reward for sample in batch.samples] for batch in made] == [[0.0, 1.0], [1.0, 1.0]]
    assert caplog.messages == [line.replace("\\", "") + ", twice: their reward is 0"]


def test_an_evaluation_counts_its_timeouts(caplog: pytest.LogCaptureFixture):
    late = answer("x", "", reward_error="took more than 5 s of CPU time")
    late.reward = 0.0
    metrics: Metrics = {}
    with caplog.at_level(logging.WARNING, logger="slimectl"):
        list(HeldOutDataset("held_out", Settings(), lambda sample: 0.0).summarized([late], metrics))
    assert caplog.messages == [
        "eval.data.held_out: grading 1 of 1 samples exceeded score.timeout_s = 5 s of CPU time, or 60 s of wall time, "
        "twice: their reward is 0"
    ]
