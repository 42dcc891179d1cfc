"""Rounds of scored samples: filled group by group, filtered, with what is left over kept for the next."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from slimectl.data.buffer import SamplingState
from slimectl.data.plain import kind_of
from slimectl.errors import HookError, SlimectlError
from slimectl.hooks import hook
from slimectl.ports import Agent, Engine, Executor, FromBuffer, Keep, RewardFn
from slimectl.settings import Settings
from slimectl.stages.attempt import UNFINISHED, Attempts, single_turn
from slimectl.stages.groups import OwnGroups, PromptGroups
from slimectl.stages.own_rollout import FUNCTION, OwnRollout, own_rounds
from slimectl.stages.rollout import most_in_flight
from slimectl.stages.sample_hooks import agent_at, on_sample, process_all
from slimectl.stages.score import score
from slimectl.stages.underway import Group, Underway
from slimectl.types import Metrics, Prompt, Round, Sample, Status

Clock = Callable[[], float]

HOPELESS = 64
"""Rounds' worth of groups dropped for one round at which the filter is taken to want what does not exist."""

LOOSEN = "loosen rollout.dynamic_sampling_filter_path, or give prompts that suit the model"


def sampled_rounds(
    prompts: Iterable[Prompt],
    engine: Engine,
    tokenizer: Any,
    reward: RewardFn,
    settings: Settings,
    *,
    executor: Executor,
    agent: Agent | None = None,
    keep: Keep | None = None,
    from_buffer: FromBuffer | None = None,
    source: Any = None,
    count: Callable[[], int] | None = None,
    state: SamplingState | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[Round]:
    """Round after round of scored samples, until the prompts or `settings.run.num_rollout` end; made when asked for.

    A round is `settings.run.rollout_batch_size` groups that `keep` lets pass; for each that it drops another prompt is
    begun. A data source of the user's (`source`) stands in for `prompts`, and a function of theirs for all of this
    (rollout.function_path); `count` tells such functions how many prompts an epoch has. With
    `rollout.over_sampling_batch_size` that many are begun at the start, and those beyond the round wait in the buffer,
    finished, for the next one (`from_buffer` picks among them). With `rollout.partial_rollout` groups are taken as they
    finish, and what is then unfinished is broken off, to go on in the next round.

    With `settings.run.ahead` above 1, the answers of up to ahead - 1 further rounds are under way meanwhile, so that
    the longest answer of a round keeps nobody waiting.

    Each round carries the state after it, from which the next ones are the same again: but for answers that were under
    way or broken off when servers, or other requests, had a say in how far each had come.
    """
    state, last = state or SamplingState(), settings.run.num_rollout
    hooked: dict[str, Any] = {"on_sample": on_sample(settings), "agent_at": agent_at(settings)}
    attempts = Attempts(engine, tokenizer, settings.rollout, agent or single_turn, **hooked)
    rounds = _Rounds(prompts, attempts, reward, settings, executor, keep, from_buffer, source, count, state)
    if function := hook(settings, FUNCTION):
        rounds.going.close()
        own = OwnRollout(function, attempts, settings)
        yield from own_rounds(own, rounds.source, rounds.graded, settings, state, clock)
        return
    try:
        while last is None or rounds.state.rounds < last:
            started = clock()
            samples = rounds.next()
            rounds.check(samples)
            if not samples:
                return
            yield Round(samples, clock() - started, rounds.metrics, rounds.state.snapshot())
    finally:
        rounds.going.close()


class _Rounds:
    """The groups under way, those taken, and those that wait."""

    def __init__(
        self,
        prompts: Iterable[Prompt],
        attempts: Attempts,
        reward: RewardFn,
        settings: Settings,
        executor: Executor,
        keep: Keep | None,
        from_buffer: FromBuffer | None,
        source: Any,
        count: Callable[[], int] | None,
        state: SamplingState,
    ) -> None:
        self.state = state
        self.metrics: Metrics = {}
        self.going = Underway(attempts)
        self._too_long = self._continued = 0
        self._settings = settings
        self._seen: list[Group] = []
        epochs = None if settings.run.num_rollout else settings.run.num_epoch or 1
        self.source: PromptGroups | OwnGroups = (
            PromptGroups(attempts.drop_long_prompts(prompts, self._count_too_long), attempts, state, count=count)
            if source is None
            else OwnGroups(source, attempts, state, epochs=epochs, left_out=self._count_too_long)
        )
        self._size, self._further = settings.run.rollout_batch_size, max(0, settings.run.ahead - 1)
        self._last = settings.run.num_rollout
        given = settings.rollout
        self._over, self._partial = given.over_sampling_batch_size or self._size, given.partial_rollout
        self._most = most_in_flight(given)
        self._keep, self._from_buffer = keep, from_buffer or oldest_first
        self._scored: Callable[[Iterable[Sample]], Iterator[Sample]] = lambda samples: score(
            samples, reward, settings.score, executor=executor
        )
        self._attempts = attempts
        self._drops: Counter[str] = Counter()

    def next(self) -> list[Sample]:
        """The samples of the next round, fewer where the prompts end."""
        self._drops.clear()
        self._seen.clear()
        self._too_long = 0
        self._attempts.rollout_id = self.state.rounds + 1
        plain = self._keep is None and self._over == self._size and not self._partial
        samples = list(self._scored(self._as_they_come())) if plain else self._filled()
        if samples:
            groups = [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]
            process_all(groups if plain else list(self._seen), self.source, self._settings)
            self.state.rounds += 1
            self.source.save(self.state.rounds)
        self.metrics = self._counts()
        if self.going:
            self.state.position = self.going.oldest_index
        return samples

    def _counts(self) -> Metrics:
        """What was left out of the round, and what waits for the next."""
        counts = {f"dynamic_filter/drop_{why}": count for why, count in sorted(self._drops.items())}
        if self._too_long:
            counts["prompts_too_long"] = self._too_long
        if self._partial or self._over > self._size:
            counts["waiting_groups"] = len(self.state.buffer)
        if self._partial:
            counts["continued_samples"] = self._continued
        return {f"rollout/{name}": float(count) for name, count in counts.items()}

    def _as_they_come(self) -> Iterator[Sample]:
        """Nothing can be dropped, so grading goes beside sampling."""
        for taken in range(self._size):
            self._begin(taken, self._size)
            if not self.going:
                return
            yield from self.going.oldest()

    def _filled(self) -> list[Sample]:
        chosen = self._from_buffer(self.state.buffer, self._size, self.state.rounds + 1)
        taken = [group for group in chosen if _is_done(group)]
        self._continued = 0
        for group in chosen:
            if not _is_done(group):
                self._continued += sum(sample.status in UNFINISHED for sample in group)
                self.going.go_on(copy.deepcopy(group))
        wanted = self._over
        while len(taken) < self._size:
            self._begin(len(taken), wanted)
            wanted = self._size  # beyond the first, one more for each that is dropped
            if not self.going:
                break
            group = self.going.first() if self._partial else self.going.oldest()
            if self._passes(group := self.graded(group), len(taken)):
                taken.append(group)
        self.state.buffer[:0] = taken[self._size :]
        self._put_by()
        return [sample for group in taken[: self._size] for sample in group]

    def _begin(self, taken: int, wanted: int) -> None:
        """Have as many groups under way as the round lacks, or as working ahead allows."""
        target = min(self._most, wanted - taken)
        if self._further:
            target = self._further * self._size + 1
            if self._last is not None:
                target = min(target, (self._last - self.state.rounds) * self._size - taken)
        while len(self.going) < target:
            if not self.source.begin(self.going):
                return

    def _put_by(self) -> None:
        """What this round began and did not need."""
        if self._further:
            return
        if self._partial:
            self.state.buffer += self.going.break_off()
        while self.going:
            group = self.graded(self.going.oldest())
            if self._passes(group, self._size):
                self.state.buffer.append(group)

    def graded(self, group: Group) -> Group:
        """The group with its rewards; one that waited in the user's source has them already."""
        return group if _is_done(group) else list(self._scored(group))

    def _passes(self, group: Group, taken: int) -> bool:
        self._seen.append(group)
        kept, why = (True, "") if self._keep is None else verdict(self._keep(group))
        if kept:
            return True
        self._drops[why] += 1
        if self._drops.total() >= HOPELESS * self._size:
            raise SlimectlError(
                f"round {self.state.rounds + 1}: {self._dropped()}, {taken} of {self._size} kept; {LOOSEN}"
            )
        return False

    def _dropped(self) -> str:
        reasons = ", ".join(f"{why} {count}" for why, count in self._drops.most_common(3))
        return f"{self._drops.total()} groups dropped ({reasons})"

    def check(self, samples: list[Sample]) -> None:
        """Raises SlimectlError where nothing is to be learnt: prompts that end before the first group passed, or a
        round in which every attempt failed."""
        if not samples and not self.state.rounds and self._drops:
            raise SlimectlError(f"round 1: {self._dropped()}, and then the prompts ended; {LOOSEN}")
        if samples and all(sample.status is Status.FAILED for sample in samples):
            raise SlimectlError(
                f"round {self.state.rounds}: all {len(samples)} attempts failed, the first with "
                f"{samples[0].metadata.get('error')}; mend rollout.custom_generate_function_path"
            )

    def _count_too_long(self, prompt: Prompt) -> None:
        if prompt.index >= self.state.long_prompts_until:  # else the round that an earlier process drew it for has it
            self._too_long += 1
            self.state.long_prompts_until = prompt.index + 1


def oldest_first(buffer: list[Group], count: int, rollout_id: int) -> list[Group]:
    """Takes up to `count` groups out of the buffer."""
    chosen = buffer[:count]
    del buffer[:count]
    return chosen


def verdict(answer: Any) -> tuple[bool, str]:
    """Whether to keep a group, and why not. Raises HookError if a filter answered something else."""
    kept, why = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, "filtered")
    if not isinstance(kept, bool):
        raise HookError(
            f"rollout.dynamic_sampling_filter_path: returned {kind_of(answer)}; return True, False or "
            f"(False, 'the reason')"
        )
    return kept, str(why or "filtered")


def _is_done(group: Group) -> bool:
    return all(sample.reward is not None and sample.status not in UNFINISHED for sample in group)
