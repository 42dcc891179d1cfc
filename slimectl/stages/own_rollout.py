"""A user's own function for whole rounds."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slimectl.algorithms.seeds import sample_seed
from slimectl.data.buffer import SamplingState
from slimectl.errors import HookError
from slimectl.hooks import Args, Hook, hook
from slimectl.ports import Agent, Engine, OnSample
from slimectl.rewards.verdict import is_number
from slimectl.settings import Settings
from slimectl.stages.attempt import Attempts, sampling_params, single_turn
from slimectl.stages.groups import OwnGroups, PromptGroups, flattened
from slimectl.stages.sample_hooks import check_lengths, process_all
from slimectl.stages.underway import Group, run_to_end
from slimectl.types import Completion, Metrics, Prompt, Round, Sample, SamplingParams, Status

FUNCTION = "rollout.function_path"

Graded = Callable[[list[Sample]], list[Sample]]
"""Samples with their rewards."""


class OwnRollout:
    """rollout.function_path: a function that makes whole rounds."""

    def __init__(self, found: Hook, attempts: Attempts, settings: Settings) -> None:
        self._hook, self._attempts, self._settings = found, attempts, settings
        self._loop = asyncio.new_event_loop()
        self._draws, self._versions, self._rollout_id = 0, dict[str, None](), 0

    def groups(self, rollout_id: int, source: PromptGroups | OwnGroups) -> tuple[list[Group], Metrics]:
        """One round of it, ungraded, and its own metrics; no groups at the end. Raises HookError for anything else."""
        self._draws, self._rollout_id = 0, rollout_id
        self._versions.clear()
        self._attempts.rollout_id = rollout_id
        args, evaluation = Args(self._settings), self._attempts.evaluation
        made = self._hook(
            {
                "args": args,
                "settings": args,
                "rollout_id": rollout_id,
                "data_source": source,
                "evaluation": evaluation,
                "generate": self._generate,
                "attempt": self._attempts.rest,
                "sampling_params": self._params,
                "tokenizer": self._attempts.tokenizer,
            }
        )
        if inspect.isawaitable(made):
            made = run_to_end(self._loop, _finished(made))
        groups, metrics = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
        if not isinstance(groups, list) or not all(isinstance(group, list) and group for group in groups):
            raise self._hook.returned(made, "groups (lists of Samples), or (groups, metrics)")
        if not all(isinstance(sample, Sample) for sample in flattened(groups)):
            raise self._hook.returned(made, "groups whose members are Samples, or (groups, metrics)")
        self._check_groups(groups)
        for sample in flattened(groups):
            sample.status = Status.COMPLETED if sample.status is Status.PENDING else sample.status
            sample.weight_versions = sample.weight_versions or list(self._versions)
        return groups, self._checked(metrics)

    def close(self) -> None:
        """End what the function left under way."""
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(self._attempts.engine.abort())
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    @property
    def _params(self) -> SamplingParams:
        return self._attempts.params or sampling_params(self._attempts.settings)

    async def _generate(self, tokens: list[int], params: SamplingParams | None = None) -> Completion:
        params = params or self._params
        if params.seed is None:
            self._draws += 1
            text = f"round {self._rollout_id}"
            params = dataclasses.replace(params, seed=sample_seed(self._attempts.settings.seed, text, self._draws))
        context = self._attempts.context
        if context is not None and len(tokens) >= context:
            return Completion([], [], "", "length")
        completion = await self._attempts.engine.generate(tokens, params=params)
        self._versions |= dict.fromkeys(completion.weight_versions)
        return completion

    def _check_groups(self, groups: list[Group]) -> None:
        where = f"{FUNCTION}: {self._hook.path}"
        numbers = [group[0].group_index for group in groups]
        if len(set(numbers)) < len(numbers):
            raise HookError(f"{where}: two groups of a round have the same group_index; take them from data_source")
        for sample in flattened(groups):
            check_lengths(self._hook, sample)
            if sample.response_length > len(sample.tokens):
                raise HookError(
                    f"{where}: sample {sample.index} has {len(sample.tokens)} tokens and a response of "
                    f"{sample.response_length}; tokens are the prompt's and the response's"
                )

    def _checked(self, metrics: Any) -> Metrics:
        fit = isinstance(metrics, dict) and all(
            isinstance(name, str) and is_number(value) for name, value in metrics.items()
        )
        if not fit:
            raise self._hook.returned(metrics, "finite numbers by name as metrics")
        return {name if "/" in name else f"rollout/{name}": float(value) for name, value in metrics.items()}


async def _finished(made: Any) -> Any:
    return await made


def own_rounds(
    function: OwnRollout,
    source: PromptGroups | OwnGroups,
    graded: Graded,
    settings: Settings,
    state: SamplingState,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Round]:
    """As `rounds.sampled_rounds`, of rounds that the user's function makes; samples without a reward are graded."""
    last = settings.run.num_rollout
    try:
        while last is None or state.rounds < last:
            started = clock()
            groups, metrics = function.groups(state.rounds + 1, source)
            if not groups:
                return
            samples = flattened(groups)
            given = {id(sample): sample.reward for sample in samples if sample.reward is not None}
            graded([sample for sample in samples if id(sample) not in given])
            process_all(groups, source, settings)
            state.rounds += 1
            source.save(state.rounds)
            yield Round(samples, clock() - started, metrics, state.snapshot())
    finally:
        function.close()


def own_samples(
    prompts: Iterable[Prompt],
    engine: Engine,
    tokenizer: Any,
    settings: Settings,
    *,
    agent: Agent | None = None,
    on_sample: OnSample | None = None,
    agent_at: Callable[[str], Agent] | None = None,
    source: Any = None,
    epochs: int | None = 1,
    left_out: Callable[[Prompt], Any] = lambda prompt: None,
) -> Iterator[Sample]:
    """As `rollout.rollout`, of every round that the function makes until it, the prompts or run.num_rollout end."""
    attempts = Attempts(
        engine, tokenizer, settings.rollout, agent or single_turn, on_sample=on_sample, agent_at=agent_at
    )
    state, function = SamplingState(), hook(settings, FUNCTION)
    assert function is not None
    groups_of: PromptGroups | OwnGroups = PromptGroups(attempts.drop_long_prompts(prompts, left_out), attempts, state)
    if source is not None:
        groups_of = OwnGroups(source, attempts, state, epochs=epochs, left_out=left_out)
    own, last, number = OwnRollout(function, attempts, settings), settings.run.num_rollout, 0
    try:
        while last is None or number < last:
            number += 1
            groups, _ = own.groups(number, groups_of)
            if not groups:
                return
            yield from flattened(groups)
    finally:
        own.close()


def own_evaluation(
    function: Hook,
    prompts: Iterable[Prompt],
    attempts: Attempts,
    settings: Settings,
    rollout_id: int,
    left_out: Callable[[Prompt], Any] = lambda prompt: None,
) -> Iterator[Sample]:
    """What the function makes of held-out prompts, in one call; ungraded where it leaves that open."""
    own = OwnRollout(function, attempts, settings)
    known = list(attempts.drop_long_prompts(prompts, left_out))
    source = PromptGroups(iter(known), attempts, SamplingState(), count=lambda: len(known))
    try:
        yield from flattened(own.groups(rollout_id, source)[0])
    finally:
        own.close()
