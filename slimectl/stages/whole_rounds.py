"""Rounds that a user's function samples as a whole, instead of the scheduler: in runs, rollouts and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from slimectl.settings import Settings
from slimectl.stages.hooks import RoundSampler
from slimectl.stages.prompt_groups import PromptSource, UserDataSource, flatten
from slimectl.stages.request_times import take_requests
from slimectl.stages.round_timer import RoundTimer
from slimectl.stages.score import report_grading
from slimectl.types import RolloutBatch, Sample

GroupSource = PromptSource | UserDataSource


def whole_rounds(
    source: GroupSource,
    sampler: RoundSampler,
    graded: Callable[[list[Sample]], list[Sample]],
    settings: Settings,
    timer: RoundTimer,
) -> Iterator[RolloutBatch]:
    """Yield rounds like `rounds.sampled_rounds`. Samples without a reward are graded."""
    last, state = settings.run.num_rollout, source.state
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
            source.generator.hooks.on_round(groups, source)
            state.rounds += 1
            source.save(state.rounds)
            seconds = timer.clock() - started
            timings = timer.take(state.rounds) | take_requests(
                source.generator.requests, settings.track.timeline_requests
            )
            yield RolloutBatch(samples, seconds, metrics, state.snapshot(), timings=timings)
    finally:
        sampler.close()


def whole_round_samples(
    source: GroupSource, sampler: RoundSampler, *, max_rounds: int | None = None, first: int = 1
) -> Iterator[Sample]:
    """Yield samples like `rollout.rollout`, round by round from number `first` on.

    They end with the sampler, the prompts or `max_rounds`.
    """
    try:
        for number in count(first) if max_rounds is None else range(first, first + max_rounds):
            groups, _ = sampler.groups(number, source)
            if not groups:
                return
            yield from flatten(groups)
    finally:
        sampler.close()
