"""Schedules rounds of scored samples: sampling, dynamic filtering and a buffer of surplus groups."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from slimectl.data.json_values import kind_of
from slimectl.errors import HookError, SlimectlError
from slimectl.protocols import NO_PROGRESS, Executor, Progress, RewardFn
from slimectl.settings import Settings
from slimectl.stages.failed_attempts import FailureCount
from slimectl.stages.generation import UNFINISHED
from slimectl.stages.in_flight import Group, InFlightGroups
from slimectl.stages.request_times import take_requests
from slimectl.stages.rollout import most_in_flight
from slimectl.stages.round_timer import Clock, RoundTimer
from slimectl.stages.score import report_grading, reward_number, score
from slimectl.stages.whole_rounds import GroupSource, whole_rounds
from slimectl.system.stdio import quantity
from slimectl.types import Metrics, Prompt, RolloutBatch, Sample, Status

MAX_DROPPED_ROUNDS = 64
"""Number of dropped groups, in multiples of the round size, after which the filter counts as unsatisfiable."""

FILTER_HINT = "Loosen rollout.dynamic_sampling_filter_path, or use prompts that suit the model"


def sampled_rounds(
    source: GroupSource,
    reward: RewardFn,
    settings: Settings,
    *,
    executor: Executor,
    clock: Clock = time.perf_counter,
    progress: Progress = NO_PROGRESS,
) -> Iterator[RolloutBatch]:
    """Yield rounds of scored samples lazily, until the prompts or `settings.run.num_rollout` end.

    A round is `settings.run.rollout_batch_size` groups that pass `hooks.keep_group` of the source's generator. Each
    dropped group is replaced by another prompt. `hooks.sample_rounds` replaces this whole scheduler. With
    `rollout.over_sampling_batch_size`, that many groups are submitted at the start, and finished surplus groups wait in
    the buffer for the next round (`hooks.take_from_buffer` picks among them). With `rollout.partial_rollout`, groups
    are taken as they finish, and unfinished ones are interrupted and resumed in the next round.

    With `settings.run.async_level` n > 1, up to n - 1 further rounds are sampled meanwhile. So the engine is not idle
    during the longest response of a round.

    Each round has the sampler state after it, from which the following rounds can be reproduced. This excludes
    responses in flight or interrupted, whose progress depends on servers and other requests.
    """
    state, max_rounds = source.state, settings.run.num_rollout
    timer = RoundTimer(clock, log_memory=settings.track.log_memory, progress=progress)
    rounds = RoundScheduler(source, reward, settings, executor, timer)
    try:
        if (sample_rounds := source.generator.hooks.sample_rounds) is not None:
            yield from whole_rounds(source, sample_rounds(source.generator), rounds.graded, settings, timer)
            return
        while max_rounds is None or state.rounds < max_rounds:
            started = clock()
            with timer.time("perf/generate_time"):
                samples = rounds.next()
            rounds.check(samples)
            if not samples:
                return
            seconds = clock() - started
            timings = timer.take(state.rounds) | take_requests(
                source.generator.requests, settings.track.timeline_requests
            )
            yield RolloutBatch(samples, seconds, rounds.metrics, state.snapshot(), timings=timings)
    finally:
        rounds.in_flight.close()


class RoundScheduler:
    """Schedules groups in flight, collected groups and buffered groups."""

    def __init__(
        self, source: GroupSource, reward: RewardFn, settings: Settings, executor: Executor, timer: RoundTimer
    ) -> None:
        self.source, self.state, self._attempts = source, source.state, source.generator
        self.metrics: Metrics = {}
        self.in_flight = InFlightGroups(source.generator)
        source.generator.on_skipped = self._count_too_long
        self._too_long = self._resumed_samples = 0
        self._settings = settings
        self._sampled_groups: list[Group] = []
        self._size, self._rounds_ahead = settings.run.rollout_batch_size, max(0, settings.run.async_level - 1)
        self._max_rounds = settings.run.num_rollout
        rollout = settings.rollout
        self._oversampling_size, self._partial = rollout.over_sampling_batch_size or self._size, rollout.partial_rollout
        self._max_in_flight = most_in_flight(rollout)
        self._hooks = source.generator.hooks
        # Time spent waiting for samples during grading counts as generation time.
        self._score: Callable[[Iterable[Sample]], Iterator[Sample]] = lambda samples: timer.iterate(
            "perf/reward_time",
            score(timer.iterate("perf/generate_time", samples), reward, settings.score, executor=executor),
        )
        self._progress = timer.progress
        self._drops: Counter[str] = Counter()

    def next(self) -> list[Sample]:
        """Return the samples of the next round, which may be fewer at the end of the prompts."""
        self._drops.clear()
        self._sampled_groups.clear()
        self._too_long = 0
        self._attempts.rollout_id = self.state.rounds + 1
        plain = self._hooks.keep_group is None and self._oversampling_size == self._size and not self._partial
        samples = list(self._score(self._stream_round())) if plain else self._fill_round()
        if samples:
            groups = [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]
            for group in groups if plain else ():
                self._add_results(group)
            self._hooks.on_round(groups if plain else list(self._sampled_groups), self.source)
            self.state.rounds += 1
            self.source.save(self.state.rounds)
        self.metrics = self._count_metrics()
        if self.in_flight:
            self.state.position = self.in_flight.oldest_index
        return samples

    def _count_metrics(self) -> Metrics:
        """Return counts of dropped groups and prompts, buffered groups and resumed samples."""
        counts = {f"dynamic_filter/drop_{reason}": count for reason, count in sorted(self._drops.items())}
        counts |= {f"pool/{name}": count for name, count in self.source.pool_counts().items()}
        if self._too_long:
            counts["prompts_too_long"] = self._too_long
        if self._partial or self._oversampling_size > self._size:
            counts["waiting_groups"] = len(self.state.buffer)
        if self._partial:
            counts["continued_samples"] = self._resumed_samples
        return {f"rollout/{name}": float(count) for name, count in counts.items()}

    def _stream_round(self) -> Iterator[Sample]:
        """Yield the samples of a round without filters. No group can be dropped, so grading overlaps with sampling."""
        for collected in range(self._size):
            self._progress.part(collected, self._size)
            self._submit_groups(collected, self._size)
            if not self.in_flight:
                return
            yield from self.in_flight.wait_oldest()

    def _fill_round(self) -> list[Sample]:
        buffered = self._hooks.take_from_buffer(self.state.buffer, self._size, self.state.rounds + 1)
        collected = [group for group in buffered if _is_done(group)]
        self._resumed_samples = 0
        for group in buffered:
            if not _is_done(group):
                self._resumed_samples += sum(sample.status in UNFINISHED for sample in group)
                self.in_flight.start(copy.deepcopy(group))
        required = self._oversampling_size
        while len(collected) < self._size:
            self._progress.part(len(collected), self._size)
            self._submit_groups(len(collected), required)
            required = self._size  # after the first submission, one more for each dropped group
            if not self.in_flight:
                break
            group = self.in_flight.wait_any() if self._partial else self.in_flight.wait_oldest()
            if self._passes_filter(group := self.graded(group), len(collected)):
                collected.append(group)
        self.state.buffer[:0] = collected[self._size :]
        self._stash_leftovers()
        return [sample for group in collected[: self._size] for sample in group]

    def _submit_groups(self, collected: int, required: int) -> None:
        """Submit groups until the round is covered, or as many as run.async_level allows."""
        target = min(self._max_in_flight, required - collected)
        if self._rounds_ahead:
            target = self._rounds_ahead * self._size + 1
            if self._max_rounds is not None:
                target = min(target, (self._max_rounds - self.state.rounds) * self._size - collected)
        while len(self.in_flight) < target:
            if (group := self.source.next_group()) is None:
                return
            self.in_flight.start(group)

    def _stash_leftovers(self) -> None:
        """Move surplus groups of the round into the buffer. With partial rollout, interrupt the unfinished ones."""
        if self._rounds_ahead:
            return
        if self._partial:
            self.state.buffer += self.in_flight.interrupt()
        while self.in_flight:
            group = self.graded(self.in_flight.wait_oldest())
            if self._passes_filter(group, self._size):
                self.state.buffer.append(group)

    def graded(self, group: Group) -> Group:
        """Return the group with its rewards. A group from a buffer or the user's source may already have them."""
        if not _is_done(group):
            group = list(self._score(group))
            self._add_results(group)
        return group

    def _add_results(self, group: Group) -> None:
        """Tell the source which responses of a graded group succeeded. Failed and ungraded ones tell nothing."""
        key, threshold = self._settings.score.reward_key, self._settings.eval.success_threshold
        graded = [s for s in group if s.status is not Status.FAILED and not s.has_no_reward]
        self.source.add_results(group, [reward_number(sample, key) >= threshold for sample in graded])

    def _passes_filter(self, group: Group, collected: int) -> bool:
        self._sampled_groups.append(group)
        keep_group = self._hooks.keep_group
        keep, reason, is_fallback = (True, "", False) if keep_group is None else checked_decision(keep_group(group))
        if keep or (is_fallback and collected + 1 + len(self.in_flight) <= self._size):
            return True
        self._drops[reason] += 1
        if self._drops.total() >= MAX_DROPPED_ROUNDS * self._size:
            raise SlimectlError(
                f"round {self.state.rounds + 1}: {self._describe_drops()}, {collected} of {self._size} kept. "
                f"{FILTER_HINT}"
            )
        return False

    def _describe_drops(self) -> str:
        reasons = ", ".join(f"{reason} {count}" for reason, count in self._drops.most_common(3))
        return f"{quantity(self._drops.total(), 'group')} dropped ({reasons})"

    def check(self, samples: list[Sample]) -> None:
        """Raise SlimectlError if there is nothing to train on.

        Either the prompts ended before the first group passed the filter, or too many attempts of the round failed or
        could not be graded in time.
        """
        if not samples and not self.state.rounds and self._drops:
            raise SlimectlError(f"round 1: {self._describe_drops()}, and then the prompts ended. {FILTER_HINT}")
        count = FailureCount()
        for sample in samples:
            count.add(sample)
        count.check(self._settings.rollout, f"round {self.state.rounds}: {count.with_cause}")
        limits, share = self._settings.score, self._settings.run.max_reward_timeouts
        report_grading(samples, limits, f"round {self.state.rounds}", max_share=share)

    def _count_too_long(self, prompt: Prompt) -> None:
        if prompt.index >= self.state.long_prompts_until:  # otherwise it was counted before the run was resumed
            self._too_long += 1
            self.state.long_prompts_until = prompt.index + 1


def checked_decision(answer: Any) -> tuple[bool, str, bool]:
    """Return (keep, reason, whether to keep the group if too few others are left) from a filter's result.

    Raises HookError if the filter returned anything else.
    """
    keep, reason = answer[:2] if isinstance(answer, tuple) and len(answer) in (2, 3) else (answer, "filtered")
    if not isinstance(keep, bool):
        raise HookError(
            f"rollout.dynamic_sampling_filter_path: returned {kind_of(answer)}. Return True, False or "
            f"(False, 'the reason')"
        )
    return keep, str(reason or "filtered"), isinstance(answer, tuple) and answer[2:] == (True,)


def _is_done(group: Group) -> bool:
    return all(
        (sample.reward is not None or sample.has_no_reward) and sample.status not in UNFINISHED for sample in group
    )
