"""Runs a user's function that samples whole rounds (rollout.function_path)."""

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
"""Grades samples and returns them."""


class OwnRollout:
    """Calls the function of rollout.function_path once per round and validates its groups and metrics."""

    def __init__(self, function: Hook, attempts: Attempts, settings: Settings) -> None:
        self._hook, self._attempts, self._settings = function, attempts, settings
        self._loop = asyncio.new_event_loop()
        self._requests, self._versions, self._rollout_id = 0, dict[str, None](), 0

    def groups(self, rollout_id: int, source: PromptGroups | OwnGroups) -> tuple[list[Group], Metrics]:
        """Return one round's ungraded groups and the function's metrics; no groups at the end.

        Raises HookError if the function returns anything else.
        """
        self._requests, self._rollout_id = 0, rollout_id
        self._versions.clear()
        self._attempts.rollout_id = rollout_id
        args, evaluation = Args(self._settings), self._attempts.evaluation
        result = self._hook(
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
        if inspect.isawaitable(result):
            result = run_to_end(self._loop, _await_result(result))
        groups, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(groups, list) or not all(isinstance(group, list) and group for group in groups):
            raise self._hook.returned(result, "groups (lists of Samples), or (groups, metrics)")
        if not all(isinstance(sample, Sample) for sample in flattened(groups)):
            raise self._hook.returned(result, "groups whose members are Samples, or (groups, metrics)")
        self._check_groups(groups)
        for sample in flattened(groups):
            sample.status = Status.COMPLETED if sample.status is Status.PENDING else sample.status
            sample.weight_versions = sample.weight_versions or list(self._versions)
        return groups, self._check_metrics(metrics)

    def close(self) -> None:
        """Cancel tasks that the function left running."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(self._attempts.engine.abort())
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    @property
    def _params(self) -> SamplingParams:
        return self._attempts.params or sampling_params(self._attempts.settings)

    async def _generate(self, tokens: list[int], params: SamplingParams | None = None) -> Completion:
        params = params or self._params
        if params.seed is None:
            self._requests += 1
            text = f"round {self._rollout_id}"
            params = dataclasses.replace(params, seed=sample_seed(self._attempts.settings.seed, text, self._requests))
        context = self._attempts.context
        if context is not None and len(tokens) >= context:
            return Completion([], [], "", "length")
        completion = await self._attempts.engine.generate(tokens, params=params)
        self._versions |= dict.fromkeys(completion.weight_versions)
        return completion

    def _check_groups(self, groups: list[Group]) -> None:
        location = f"{FUNCTION}: {self._hook.path}"
        group_indices = [group[0].group_index for group in groups]
        if len(set(group_indices)) < len(group_indices):
            raise HookError(f"{location}: two groups of a round have the same group_index; take them from data_source")
        for sample in flattened(groups):
            check_lengths(self._hook, sample)
            if sample.response_length > len(sample.tokens):
                raise HookError(
                    f"{location}: sample {sample.index} has {len(sample.tokens)} tokens and a response of "
                    f"{sample.response_length}; tokens are the prompt's and the response's"
                )

    def _check_metrics(self, metrics: Any) -> Metrics:
        fit = isinstance(metrics, dict) and all(
            isinstance(name, str) and is_number(value) for name, value in metrics.items()
        )
        if not fit:
            raise self._hook.returned(metrics, "finite numbers by name as metrics")
        return {name if "/" in name else f"rollout/{name}": float(value) for name, value in metrics.items()}


async def _await_result(awaitable: Any) -> Any:
    return await awaitable


def own_rounds(
    function: OwnRollout,
    source: PromptGroups | OwnGroups,
    graded: Graded,
    settings: Settings,
    state: SamplingState,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Round]:
    """Yield rounds like `rounds.sampled_rounds`, sampled by the user's function; grade samples without a reward."""
    last = settings.run.num_rollout
    try:
        while last is None or state.rounds < last:
            started = clock()
            groups, metrics = function.groups(state.rounds + 1, source)
            if not groups:
                return
            samples = flattened(groups)
            rewarded_ids = {id(sample): sample.reward for sample in samples if sample.reward is not None}
            graded([sample for sample in samples if id(sample) not in rewarded_ids])
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
    """Yield samples like `rollout.rollout`, round by round, until the function, the prompts or run.num_rollout end."""
    attempts = Attempts(
        engine, tokenizer, settings.rollout, agent or single_turn, on_sample=on_sample, agent_at=agent_at
    )
    state, function = SamplingState(), hook(settings, FUNCTION)
    assert function is not None
    groups_of: PromptGroups | OwnGroups = PromptGroups(attempts.drop_long_prompts(prompts, left_out), attempts, state)
    if source is not None:
        groups_of = OwnGroups(source, attempts, state, epochs=epochs, left_out=left_out)
    user_rollout, max_rounds, number = OwnRollout(function, attempts, settings), settings.run.num_rollout, 0
    try:
        while max_rounds is None or number < max_rounds:
            number += 1
            groups, _ = user_rollout.groups(number, groups_of)
            if not groups:
                return
            yield from flattened(groups)
    finally:
        user_rollout.close()


def own_evaluation(
    function: Hook,
    prompts: Iterable[Prompt],
    attempts: Attempts,
    settings: Settings,
    rollout_id: int,
    left_out: Callable[[Prompt], Any] = lambda prompt: None,
) -> Iterator[Sample]:
    """Yield the samples of one call of the function on held-out prompts; those without a reward are ungraded."""
    user_rollout = OwnRollout(function, attempts, settings)
    prompt_list = list(attempts.drop_long_prompts(prompts, left_out))
    source = PromptGroups(iter(prompt_list), attempts, SamplingState(), count=lambda: len(prompt_list))
    try:
        yield from flattened(user_rollout.groups(rollout_id, source)[0])
    finally:
        user_rollout.close()
