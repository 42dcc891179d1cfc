"""User functions for samples: generate functions, sample hooks, and hooks for all samples of a round."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from slimectl.data.hashing import sample_seed
from slimectl.data.records import refused_path
from slimectl.errors import HookError, RecordError
from slimectl.hooks import HOOKS, FlatSettings, Hook, hook, hooks
from slimectl.protocols import Agent, Engine, SampleHook
from slimectl.rewards.base import is_number
from slimectl.settings import Settings
from slimectl.stages.generation import GroupGenerator, sampling_params, single_turn
from slimectl.stages.in_flight import Group, run_to_end
from slimectl.stages.prompt_groups import PromptSource, UserDataSource, flatten
from slimectl.types import Completion, Metrics, Prompt, RolloutBatch, Sample, SamplerState, SamplingParams, Status

SAMPLE, ALL = "rollout.sample_hook_path", "rollout.all_samples_process_path"
GENERATE = "rollout.custom_generate_function_path"


def as_agent(function: Hook, args: FlatSettings) -> Agent:
    """Wrap the user's generate function as an agent; the settings are among its arguments.

    A call that raises becomes a failed sample, whether the function is async or not; a call that exits ends the run.
    """

    def agent(arguments: Mapping[str, Any]) -> Any:
        return function.attempt({**arguments, "args": args, "settings": args})

    agent.resumes = getattr(function.function, "resumes", False)  # type: ignore[attr-defined]
    agent.name = function.name  # type: ignore[attr-defined]
    agent.together = "samples" in function.wanted  # type: ignore[attr-defined]
    return agent


def agent_at(settings: Settings) -> Callable[[str], Agent]:
    """Return a cached loader of the agent at a path that a sample names.

    The loader raises HookError if there is none, or one for groups, and RecordError if samples may not name one.
    """

    @cache
    def load(path: str) -> Agent:
        if not settings.rollout.allow_paths_in_records:
            raise RecordError(refused_path("generate_function_path", path))
        agent = as_agent(HOOKS[GENERATE].load(path), FlatSettings(settings))
        if getattr(agent, "together", False):
            raise HookError(f"{GENERATE}: {path} asks for samples, and a sample names it for itself; ask for sample")
        return agent

    return load


def build_sample_hook(settings: Settings) -> SampleHook | None:
    """Return the functions of rollout.sample_hook_path as one function; None if there are none.

    An unknown round is taken to be the one in which a run without filters would sample the group.
    """
    functions, args = hooks(settings, SAMPLE), FlatSettings(settings)
    if not functions:
        return None

    async def apply_hooks(sample: Sample, rollout_id: int | None, evaluation: bool) -> Sample:
        number = sample.group_index // settings.run.rollout_batch_size + 1 if rollout_id is None else rollout_id
        for function in functions:
            arguments = {"sample": sample, "rollout_id": number, "evaluation": evaluation}
            result = function({"args": args, "settings": args, **arguments})
            result = await result if inspect.isawaitable(result) else result
            if result is not None and not isinstance(result, Sample):
                raise function.returned(result, "a Sample or None")
            sample = sample if result is None else result
            check_lengths(function, sample)
        return sample

    return apply_hooks


def check_lengths(function: Hook, sample: Sample) -> None:
    """Raises HookError if a hook left fields of a sample with inconsistent lengths."""
    count = sample.response_length
    for name in ("loss_mask", "rollout_log_probs"):
        values = getattr(sample, name)
        if values is not None and len(values) != count:
            raise HookError(
                f"{function.setting}: {function.path}: sample {sample.index}: {name} has {len(values)} values "
                f"for {count} response tokens; keep them as many"
            )


def process_all(groups: list[Group], source: PromptSource | UserDataSource, settings: Settings) -> None:
    """Call rollout.all_samples_process_path with the groups of a round, dropped ones included."""
    function = hook(settings, ALL)
    if function is None:
        return
    args = FlatSettings(settings)
    result = function({"args": args, "settings": args, "all_samples": groups, "data_source": source})
    if result is not None:
        raise function.returned(result, "nothing")


FUNCTION = "rollout.function_path"

Graded = Callable[[list[Sample]], list[Sample]]
"""Grades samples and returns them."""


class UserRollout:
    """Calls the function of rollout.function_path once per round and validates its groups and metrics."""

    def __init__(self, function: Hook, attempts: GroupGenerator, settings: Settings) -> None:
        self._hook, self._attempts, self._settings = function, attempts, settings
        self._loop = asyncio.new_event_loop()
        self._requests, self._versions, self._rollout_id = 0, dict[str, None](), 0

    def groups(self, rollout_id: int, source: PromptSource | UserDataSource) -> tuple[list[Group], Metrics]:
        """Return one round's ungraded groups and the function's metrics; no groups at the end.

        Raises HookError if the function returns anything else.
        """
        self._requests, self._rollout_id = 0, rollout_id
        self._versions.clear()
        self._attempts.rollout_id = rollout_id
        args, evaluation = FlatSettings(self._settings), self._attempts.evaluation
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
        if not all(isinstance(sample, Sample) for sample in flatten(groups)):
            raise self._hook.returned(result, "groups whose members are Samples, or (groups, metrics)")
        self._check_groups(groups)
        for sample in flatten(groups):
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
        for sample in flatten(groups):
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


def user_rounds(
    function: UserRollout,
    source: PromptSource | UserDataSource,
    graded: Graded,
    settings: Settings,
    state: SamplerState,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[RolloutBatch]:
    """Yield rounds like `rounds.sampled_rounds`, sampled by the user's function; grade samples without a reward."""
    last = settings.run.num_rollout
    try:
        while last is None or state.rounds < last:
            started = clock()
            groups, metrics = function.groups(state.rounds + 1, source)
            if not groups:
                return
            samples = flatten(groups)
            graded([sample for sample in samples if sample.reward is None])
            process_all(groups, source, settings)
            state.rounds += 1
            source.save(state.rounds)
            yield RolloutBatch(samples, clock() - started, metrics, state.snapshot())
    finally:
        function.close()


def user_samples(
    prompts: Iterable[Prompt],
    engine: Engine,
    tokenizer: Any,
    settings: Settings,
    *,
    agent: Agent | None = None,
    on_sample: SampleHook | None = None,
    agent_at: Callable[[str], Agent] | None = None,
    source: Any = None,
    epochs: int | None = 1,
    left_out: Callable[[Prompt], Any] = lambda prompt: None,
) -> Iterator[Sample]:
    """Yield samples like `rollout.rollout`, round by round, until the function, the prompts or run.num_rollout end."""
    attempts = GroupGenerator(
        engine, tokenizer, settings.rollout, agent or single_turn, on_sample=on_sample, agent_at=agent_at
    )
    state, function = SamplerState(), hook(settings, FUNCTION)
    assert function is not None
    groups_of: PromptSource | UserDataSource = PromptSource(
        attempts.drop_long_prompts(prompts, left_out), attempts, state
    )
    if source is not None:
        groups_of = UserDataSource(source, attempts, state, epochs=epochs, left_out=left_out)
    user_rollout, max_rounds, number = UserRollout(function, attempts, settings), settings.run.num_rollout, 0
    try:
        while max_rounds is None or number < max_rounds:
            number += 1
            groups, _ = user_rollout.groups(number, groups_of)
            if not groups:
                return
            yield from flatten(groups)
    finally:
        user_rollout.close()


def user_evaluation(
    function: Hook,
    prompts: Iterable[Prompt],
    attempts: GroupGenerator,
    settings: Settings,
    rollout_id: int,
    left_out: Callable[[Prompt], Any] = lambda prompt: None,
) -> Iterator[Sample]:
    """Yield the samples of one call of the function on held-out prompts; those without a reward are ungraded."""
    user_rollout = UserRollout(function, attempts, settings)
    prompt_list = list(attempts.drop_long_prompts(prompts, left_out))
    source = PromptSource(iter(prompt_list), attempts, SamplerState(), count=lambda: len(prompt_list))
    try:
        yield from flatten(user_rollout.groups(rollout_id, source)[0])
    finally:
        user_rollout.close()
