"""The loop: rollout, score and train, chained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from slimectl.ports import Agent, Engine, Executor, Policy, RewardFn
from slimectl.settings import Settings
from slimectl.stages.rollout import rollout
from slimectl.stages.score import score
from slimectl.stages.train import TrainState, train_rounds
from slimectl.streams import batched
from slimectl.types import Prompt, Sample, StepReport


class WeightSync(Protocol):
    """Carries the policy's weights to the engine."""

    def push(self) -> None: ...


def run(
    prompts: Iterable[Prompt],
    policy: Policy,
    engine: Engine,
    tokenizer: Any,
    reward: RewardFn,
    sync: WeightSync,
    settings: Settings,
    *,
    executor: Executor,
    reference: Policy | None = None,
    agent: Agent | None = None,
    state: TrainState | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[StepReport]:
    """One report per optimizer step, until the prompts end; the engine has the new weights when it arrives.

    Rounds are sampled when training asks for them, or `settings.run.ahead` rounds before.
    """
    times: dict[int, float] = {}

    def rounds() -> Iterator[list[Sample]]:
        for batch in batched(prompts, settings.run.rollout_batch_size):
            started = clock()
            attempts = rollout(batch, engine, tokenizer, settings.rollout, agent=agent)
            scored = list(score(attempts, reward, settings.score, executor=executor, reference=reference))
            times[id(scored[0])] = clock() - started
            yield scored

    sync.push()
    scored = executor.stream(rounds, ahead=settings.run.ahead)
    for report in train_rounds(scored, policy, settings, state=state):
        started = clock()
        if report.ends_round:
            sync.push()
        report.perf["perf/update_weights_time"] = clock() - started
        if report.samples:
            seconds = times.pop(id(report.samples[0]), 0.0)
            report.perf["perf/rollout_time"] = seconds
            report.perf["rollout/samples_per_second"] = len(report.samples) / seconds if seconds else 0.0
        yield report
