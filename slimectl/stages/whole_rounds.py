"""Rounds that a user's function samples as a whole, instead of the scheduler: in runs, rollouts and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from slimectl.settings import Settings
from slimectl.stages.generation import GroupGenerator
from slimectl.stages.in_flight import Group
from slimectl.stages.prompt_groups import PromptSource, UserDataSource, flatten
from slimectl.stages.round_timer import RoundTimer
from slimectl.stages.score import report_grading
from slimectl.types import Metrics, Prompt, RolloutBatch, Sample, SamplerState

GroupSource = PromptSource | UserDataSource
RoundObserver = Callable[[list[Group], GroupSource], None]
"""Called with the groups of a round and their source."""


class RoundSampler(Protocol):
    """Samples one round at a time."""

    def groups(self, rollout_id: int, source: GroupSource) -> tuple[list[Group], Metrics]:
        """Return the ungraded groups of a round (none at the end) and metrics."""
        ...

    def close(self) -> None:
        """Cancel the groups in flight."""
        ...


def whole_rounds(
    sampler: RoundSampler,
    source: GroupSource,
    graded: Callable[[list[Sample]], list[Sample]],
    settings: Settings,
    state: SamplerState,
    *,
    on_round: RoundObserver,
    timer: RoundTimer,
) -> Iterator[RolloutBatch]:
    """Yield rounds like `rounds.sampled_rounds`. Samples without a reward are graded."""
    last = settings.run.num_rollout
    try:
        while last is None or state.rounds < last:
            started = timer.clock()
            with timer.time("perf/generate_time"):
                groups, metrics = sampler.groups(state.rounds + 1, source)
            if not groups:
                return
            samples = flatten(groups)
            graded([sample for sample in samples if sample.reward is None and not sample.has_no_reward])
            report_grading(
                samples, settings.score, f"round {state.rounds + 1}", max_share=settings.run.max_reward_timeouts
            )
            on_round(groups, source)
            state.rounds += 1
            source.save(state.rounds)
            seconds = timer.clock() - started
            yield RolloutBatch(samples, seconds, metrics, state.snapshot(), timings=timer.take())
    finally:
        sampler.close()


def whole_round_samples(
    prompts: Iterable[Prompt],
    attempts: GroupGenerator,
    sample_rounds: Callable[[GroupGenerator], RoundSampler],
    *,
    max_rounds: int | None,
    source: Any = None,
    max_groups: int | None = None,
    on_skipped: Callable[[Prompt], Any] = lambda prompt: None,
) -> Iterator[Sample]:
    """Yield samples like `rollout.rollout`, round by round, until the sampler, the prompts or `max_rounds` end."""
    state = SamplerState()
    groups_of: GroupSource = PromptSource(attempts.drop_long_prompts(prompts, on_skipped), attempts, state)
    if source is not None:
        groups_of = UserDataSource(source, attempts, state, max_groups=max_groups, on_skipped=on_skipped)
    sampler, number = sample_rounds(attempts), 0
    try:
        while max_rounds is None or number < max_rounds:
            number += 1
            groups, _ = sampler.groups(number, groups_of)
            if not groups:
                return
            yield from flatten(groups)
    finally:
        sampler.close()


def whole_round_evaluation(
    prompts: Iterable[Prompt],
    attempts: GroupGenerator,
    sample_rounds: Callable[[GroupGenerator], RoundSampler],
    rollout_id: int,
    on_skipped: Callable[[Prompt], Any] = lambda prompt: None,
) -> Iterator[Sample]:
    """Yield the samples of one round over held-out prompts. Samples without a reward are ungraded."""
    sampler = sample_rounds(attempts)
    prompt_list = list(attempts.drop_long_prompts(prompts, on_skipped))
    source = PromptSource(iter(prompt_list), attempts, SamplerState(), count=lambda: len(prompt_list))
    try:
        yield from flatten(sampler.groups(rollout_id, source)[0])
    finally:
        sampler.close()
