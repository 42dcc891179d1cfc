"""Rounds: when they are made, how much of the next ones is under way, and what the loop reports of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from slimectl.algorithms.metrics import rollout_metrics
from slimectl.executors.local import LocalExecutor
from slimectl.settings.layers import Layer
from slimectl.settings.loading import resolve
from slimectl.stages.advantages import Models
from slimectl.stages.generation import GroupGenerator
from slimectl.stages.prompt_groups import PromptSource
from slimectl.stages.round_timer import RoundTimer
from slimectl.stages.rounds import sampled_rounds
from slimectl.stages.run import run, streamed
from slimectl.types import Completion, Metrics, Prompt, SamplingParams


class Echo:
    """An engine that answers with the last token of the prompt, after as many turns of the loop as it says."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.version = "0"

    async def generate(self, tokens: list[int], *, params: SamplingParams) -> Completion:
        self.log.append(f"begin {tokens[0]}")
        for _ in range(tokens[-1]):
            await asyncio.sleep(0)
        self.log.append(f"end {tokens[0]}")
        return Completion([tokens[-1]], [-0.5], "x", "stop", [self.version])

    async def abort(self) -> None: ...

    async def close(self) -> None: ...


def test_what_an_engine_counts_of_its_drafts_is_kept_and_summed_up():
    class Drafting(Echo):
        async def generate(self, tokens: list[int], *, params: SamplingParams) -> Completion:
            extras = {"spec_verify_ct": 2, "spec_draft_token_num": 8, "spec_accept_token_num": 6}
            return Completion([1] * 5, [-0.5] * 5, "x", "stop", ["0"], extras=extras)

    [first, *_] = next(made(Drafting(), "ss")).samples
    assert first.spec_info == {
        "spec_verify_ct": 2, "spec_accept_token_num": 6, "spec_draft_token_num": 8, "completion_token_num": 5
    }  # fmt: skip
    metrics = rollout_metrics([first, first], [1.0, 1.0])
    assert metrics["rollout/spec_accept_length"] == 2.5  # five tokens in two passes
    assert metrics["rollout/spec_accept_rate"] == 0.75


class Bytes:
    """A tokenizer of one token a byte."""

    eos_token_id = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode()


def settings(**run_keys: Any) -> Any:
    values = {
        "run": {"rollout_batch_size": 2, "num_rollout": 4} | run_keys,
        "rollout": {"n_samples_per_prompt": 1},
        "algorithm": {"name": "reinforce_plus_plus"},
        "sync": {"update_weights_interval": 2},
    }
    return resolve([Layer("test", values)]).settings


def prompts(turns: str) -> Iterator[Prompt]:
    """One prompt a letter: its number, then a byte that says how many turns its answer takes."""
    for i, letter in enumerate(turns):
        yield Prompt(chr(i + 1) + chr(40 if letter == "L" else 1), label="", index=i)


def made(engine: Echo, turns: str, **run_keys: Any) -> Iterator[Any]:
    given = settings(**run_keys)
    source = PromptSource(prompts(turns), GroupGenerator(engine, Bytes(), given.rollout))
    return sampled_rounds(source, lambda sample: 1.0, given, executor=LocalExecutor())


def test_a_round_ends_before_the_next_begins_unless_told_to_work_ahead():
    engine = Echo()
    rounds = made(engine, "LsLs")
    assert [sample.tokens[0] for sample in next(rounds).samples] == [1, 2]
    assert engine.log == ["begin 1", "begin 2", "end 2", "end 1"]
    assert [sample.tokens[0] for sample in next(rounds).samples] == [3, 4]
    assert next(rounds, None) is None


def test_the_longest_answer_of_a_round_keeps_no_later_round_waiting():
    engine = Echo()
    rounds = made(engine, "LsssssLs", async_level=3)
    assert [sample.tokens[0] for sample in next(rounds).samples] == [1, 2]
    # Two further rounds of two were under way beside answer 1, and no prompt beyond them.
    assert engine.log.index("end 5") < engine.log.index("end 1")
    assert "begin 7" not in engine.log
    assert [[sample.tokens[0] for sample in made.samples] for made in rounds] == [[3, 4], [5, 6], [7, 8]]


class Counting:
    """A policy that only counts its steps: enough for the loop's own promises."""

    def __init__(self) -> None:
        self.steps = 0

    @property
    def weight_version(self) -> str:
        return str(self.steps)

    def log_probs(self, rows: Any) -> list[list[float]]:
        return [[-0.5] * row.response_length for row in rows]

    def forward_backward(self, rows: Any, loss: Any) -> Metrics:
        return {"loss": 0.0}

    def optim_step(self) -> Metrics:
        self.steps += 1
        return {"grad_norm": 0.0, "lr": 0.0}


class Pushes:
    """Tells the engine the policy's version, and remembers when."""

    def __init__(self, policy: Counting, engine: Echo) -> None:
        self.policy, self.engine = policy, engine
        self.versions: list[str] = []

    def sleep(self) -> None:
        self.versions.append("sleep")

    def wake(self) -> None:
        self.versions.append("wake")

    def push(self) -> Metrics:
        self.engine.version = self.policy.weight_version
        self.versions.append(self.engine.version)
        return {"bytes": 8.0}


class Sleeping(Counting):
    """Tells when it leaves the GPUs, and with what."""

    log: list[str]

    def sleep(self, *, keep_weights: bool = False) -> None:
        self.log.append("moments leave" if keep_weights else "trainer leaves")


@pytest.mark.parametrize("offload", [True, False])
def test_engines_that_share_gpus_take_turns_with_the_trainer_and_get_weights_when_they_wake(offload: bool):
    engine, policy = Echo(), Sleeping()
    sync = Pushes(policy, engine)
    policy.log = sync.versions
    given = settings(num_rollout=2)
    cluster = given.cluster.model_copy(update={"colocate": True, "offload_train": offload})
    given = given.model_copy(update={"cluster": cluster})
    list(run(streamed(lambda: made(engine, "ssss"), LocalExecutor(), given.run), Models(policy), sync, given))
    if offload:
        rounds = [["moments leave", "wake", version, "trainer leaves"] for version in ("0", "1", "2")]
        assert sync.versions == [*rounds[0], "sleep", *rounds[1], "sleep", *rounds[2]]
    else:
        assert sync.versions == ["wake", "0", "sleep", "wake", "1", "sleep", "wake", "2"]


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_no_answer_is_staler_than_the_rounds_worked_ahead_and_the_push_interval(ahead: int):
    engine, policy = Echo(), Counting()
    sync = Pushes(policy, engine)
    given = settings(async_level=ahead, num_rollout=8)
    sampled = partial(made, engine, "ssssssssssssssss", async_level=ahead, num_rollout=8)
    reports = list(run(streamed(sampled, LocalExecutor(), given.run), Models(policy), sync, given))
    assert [report.rollout_id for report in reports] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sync.versions == ["0", "2", "4", "6", "8"]  # before anything is sampled, then every second round
    staleness = [report.metrics["rollout/staleness/max"] for report in reports]
    assert max(staleness) <= ahead + 1
    assert staleness[:2] == [0.0, 1.0]
    for report in reports:
        assert 0 <= report.timings["perf/wait_time_ratio"] <= 1
        assert ("perf/update_weights_bytes" in report.timings) == (report.rollout_id % 2 == 0)


class HandClock:
    """Time that passes only where a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_clocks_of_a_round_count_neither_what_its_reader_does_nor_any_second_twice():
    clock = HandClock()

    class Slow(Echo):
        async def generate(self, tokens: list[int], *, params: SamplingParams) -> Completion:
            clock.now += 2.0
            return await super().generate(tokens, params=params)

    class Trainer(Counting):
        def log_probs(self, rows: Any) -> list[list[float]]:
            clock.now += 0.25 * len(rows)
            return super().log_probs(rows)

        def forward_backward(self, rows: Any, loss: Any) -> Metrics:
            clock.now += 5.0
            return {"loss": 0.0}

    class Pushing(Pushes):
        def push(self) -> Metrics:
            clock.now += 0.5
            return super().push()

    def reward(sample: Any) -> float:
        clock.now += 0.125
        return 1.0

    engine, policy = Slow(), Trainer()
    values = {
        "run": {"rollout_batch_size": 2, "num_rollout": 3},
        "algorithm": {"name": "reinforce_plus_plus"},
        "train": {"num_steps_per_rollout": 2},
        "rollout": {"n_samples_per_prompt": 1},
    }
    given = resolve([Layer("test", values)]).settings
    source = PromptSource(prompts("ssssss"), GroupGenerator(engine, Bytes(), given.rollout))
    sampled = partial(sampled_rounds, source, reward, given, executor=LocalExecutor(), clock=clock)
    models = Models(policy, timer=RoundTimer(clock))
    reports = run(streamed(sampled, LocalExecutor(), given.run), models, Pushing(policy, engine), given)
    last = {}
    for report in reports:
        clock.now += 100.0  # an evaluation, a checkpoint
        assert report.timings["perf/train_time"] == 5.0
        if report.last_step_of_round:
            last[report.rollout_id] = report.timings
        else:
            assert report.timings["perf/rollout_time"] == 4.25
            assert (report.timings["perf/generate_time"], report.timings["perf/reward_time"]) == (4.0, 0.25)
    assert last.keys() == {1, 2, 3}
    for timings in last.values():
        assert timings["perf/wait_time"] == 4.25
        assert timings["perf/log_probs_time"] == 0.5
        assert timings["perf/data_preprocess_time"] == timings["perf/advantages_time"] == 0.0
        assert timings["perf/actor_train_time"] == 10.0
        assert timings["perf/update_weights_time"] == 0.5
        assert timings["perf/total_time"] == 4.25 + 0.5 + 10.0 + 0.5
        assert timings["perf/wait_time_ratio"] == 4.25 / 15.25
