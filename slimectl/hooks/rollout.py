"""User functions for samples: generate functions, sample hooks, and hooks for all samples of a round."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from slimectl.data.hashing import sample_seed
from slimectl.data.images import images_of
from slimectl.data.json_values import plain_number, plain_sample, plain_value
from slimectl.data.records import refused_path
from slimectl.data.routed_experts import set_routing
from slimectl.errors import HookError, RecordError
from slimectl.hooks.args import FlatSettings
from slimectl.hooks.generation_context import GenerationContext, generating
from slimectl.hooks.logged_metrics import collected_metrics
from slimectl.hooks.registry import HOOKS, hooks, required_hook
from slimectl.migrate.slime_shapes import SamplingDict, as_groups, as_sample, filter_result, rollout_result
from slimectl.migrate.slime_shapes import sampling_params as sampling_params_of
from slimectl.plugins.callables import Hook
from slimectl.protocols import Agent
from slimectl.rewards.base import is_number
from slimectl.settings import Settings
from slimectl.stages.generation import GroupGenerator, number_executions, sampling_params
from slimectl.stages.in_flight import Group
from slimectl.stages.prompt_groups import flatten
from slimectl.stages.text_responses import GeneratedText, check_sample, fill_tokens
from slimectl.stages.whole_rounds import GroupSource
from slimectl.system.event_loop import run_on
from slimectl.types import Chat, Completion, Metrics, Prompt, Sample, SamplingParams, Status

SAMPLE, ALL = "rollout.sample_hook_path", "rollout.all_samples_process_path"
GENERATE, FUNCTION = "rollout.custom_generate_function_path", "rollout.function_path"
KEEP, BUFFER = "rollout.dynamic_sampling_filter_path", "rollout.buffer_filter_path"


def as_agent(function: Hook, args: FlatSettings) -> Agent:
    """Wrap the user's generate function as an agent. The settings are among its arguments.

    If a call raises, its sample is marked as failed, for async functions too. A call that exits ends the run.
    """

    def agent(arguments: Mapping[str, Any]) -> Any:
        params, generate = arguments["sampling_params"], arguments["generate"]

        async def generate_with(tokens: list[int], values: Any = None) -> Completion:
            completion: Completion = await generate(tokens, _sampling_params(function, values, params))
            return completion

        offered = {**arguments, "sampling_params": SamplingDict.of(params), "generate": generate_with}
        context = GenerationContext(generate_with)
        with generating(context):
            result = function.attempt({**offered, "args": args, "settings": args})
        return _samples_of(result, context) if inspect.isawaitable(result) else _as_samples(result)

    agent.resumes = getattr(function.function, "resumes", False)  # type: ignore[attr-defined]
    agent.name = function.name  # type: ignore[attr-defined]
    agent.error_location = function.error_location  # type: ignore[attr-defined]
    agent.per_group = "samples" in function.wanted  # type: ignore[attr-defined]
    return agent


async def _samples_of(awaitable: Awaitable[Any], context: GenerationContext) -> Any:
    with generating(context):
        return _as_samples(await awaitable)


def _as_samples(result: Any) -> Any:
    return list(map(as_sample, result)) if isinstance(result, list) else as_sample(result)


def _sampling_params(function: Hook, values: Any, base: SamplingParams) -> SamplingParams | None:
    """Return the parameters that a function passed to `generate`. Raises HookError for an unknown key."""
    try:
        return sampling_params_of(values, base)
    except (TypeError, ValueError) as error:
        raise HookError(f"{function.name}: {error}") from None


def agent_at(settings: Settings) -> Callable[[str], Agent]:
    """Return a cached loader of the agent at the path that a sample gives.

    The loader raises HookError if the agent does not exist, and RecordError if samples may not choose one.
    """

    @cache
    def load(path: str) -> Agent:
        if not settings.rollout.allow_paths_in_records:
            raise RecordError(refused_path("generate_function_path", path))
        return as_agent(HOOKS[GENERATE].load(path), FlatSettings(settings))

    return load


async def apply_sample_hooks(sample: Sample, rollout_id: int | None, evaluation: bool, *, settings: Settings) -> Sample:
    """Call the functions of rollout.sample_hook_path one after the other and return the sample from the last one.

    An unknown round is assumed to be the one in which a run without filters would sample the group.
    """
    args = FlatSettings(settings)
    number = sample.group_index // settings.run.rollout_batch_size + 1 if rollout_id is None else rollout_id
    for function in hooks(settings, SAMPLE):
        arguments = {"sample": sample, "rollout_id": number, "evaluation": evaluation}
        result = function.begin({"args": args, "settings": args, **arguments})
        result = await result if inspect.isawaitable(result) else result
        result = as_sample(result)
        if result is not None and not isinstance(result, Sample):
            raise function.returned(result, "a Sample or None")
        sample = plain_sample(sample) if result is None else result
        check_sample(sample, function.name)
    return sample


def keep_group(samples: Group, *, settings: Settings) -> bool | tuple[bool, str] | tuple[bool, str, bool]:
    """Call rollout.dynamic_sampling_filter_path. Return whether to train on a finished group, and the reason if not.

    A third member is True if the group is still trained on when too few others are left for the round.
    """
    user_fn, args = required_hook(settings, KEEP), FlatSettings(settings)
    answer = filter_result(user_fn({"args": args, "settings": args, "samples": samples}))
    retained = answer[0] if isinstance(answer, tuple) and len(answer) in (2, 3) else answer
    if not isinstance(retained, bool) and plain_number(retained) not in (0, 1):
        raise user_fn.returned(answer, "True, False or (False, 'the reason')")
    if not isinstance(answer, tuple):
        return bool(retained)
    decision = bool(retained), str(answer[1])
    return (*decision, True) if len(answer) == 3 and answer[2] else decision


def take_from_buffer(buffer: list[Group], count: int, rollout_id: int, *, settings: Settings) -> list[Group]:
    """Call rollout.buffer_filter_path, which removes groups from the buffer, and return these groups."""
    user_fn, args = required_hook(settings, BUFFER), FlatSettings(settings)
    arguments = {"args": args, "settings": args, "rollout_id": rollout_id, "buffer": buffer, "num_samples": count}
    groups = as_groups(user_fn(arguments))
    if not isinstance(groups, list) or not all(isinstance(group, list) and group for group in groups):
        raise user_fn.returned(groups, "a list of groups")
    return groups


def process_all(groups: list[Group], source: GroupSource, *, settings: Settings) -> None:
    """Call rollout.all_samples_process_path with the groups of a round, including dropped ones."""
    function, args = required_hook(settings, ALL), FlatSettings(settings)
    result = function({"args": args, "settings": args, "all_samples": groups, "data_source": source})
    if result is not None:
        raise function.returned(result, "nothing")
    for sample in flatten(groups):
        plain_sample(sample)


class TextModel:
    """The model for functions that are not async. `generate` blocks until the text of a response is there."""

    def __init__(
        self,
        generate: Callable[..., Awaitable[Completion]],
        attempts: GroupGenerator,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._generate, self._attempts, self._loop = generate, attempts, loop

    def generate(self, prompt: str | Chat, **values: Any) -> GeneratedText:
        """Return the response to a prompt. `values` are sampling parameters, such as `temperature`.

        Raises HookError in an async function, because the call would block its own event loop.
        """
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                raise HookError(f"{FUNCTION}: model.generate cannot be called by an async function. Await generate")
        return asyncio.run_coroutine_threadsafe(self._text(prompt, values), self._loop).result()

    async def _text(self, prompt: str | Chat, values: dict[str, Any]) -> GeneratedText:
        tokens = self._attempts.prompt_tokens(Prompt(prompt))
        completion = await self._generate(tokens, values)
        temperature = values.get("temperature", self._attempts.unseeded_params.temperature)
        return GeneratedText.of(completion, tokens, temperature or 1.0)


class UserRollout:
    """Calls the function of rollout.function_path once per round and validates its groups and metrics."""

    def __init__(self, attempts: GroupGenerator, *, settings: Settings) -> None:
        self._hook, self._attempts, self._settings = required_hook(settings, FUNCTION), attempts, settings
        self._loop = asyncio.new_event_loop()
        self._requests, self._versions, self._rollout_id = 0, dict[str, None](), 0
        self._model = TextModel(self._generate, attempts, self._loop)

    def groups(self, rollout_id: int, source: GroupSource) -> tuple[list[Group], Metrics]:
        """Return one round's ungraded groups and the function's metrics. An empty list means the end of the data.

        Raises HookError if the function returns anything else.
        """
        self._requests, self._rollout_id = 0, rollout_id
        self._versions.clear()
        self._attempts.rollout_id = rollout_id
        args, evaluation = FlatSettings(self._settings), self._attempts.evaluation
        arguments = {
            "args": args,
            "settings": args,
            "rollout_id": rollout_id,
            "data_source": source,
            "evaluation": evaluation,
            "generate": self._generate,
            "attempt": self._attempts.complete,
            "sampling_params": SamplingDict.of(self._params),
            "tokenizer": self._attempts.tokenizer,
            "model": self._model,
            "temperature": self._params.temperature,
        }
        prompts: list[Group] | None = None
        if "prompts" in self._hook.wanted:
            prompts = source.get_samples(len(source) if evaluation else self._settings.run.rollout_batch_size)
            if not prompts:
                return [], {}
            arguments["prompts"] = list(map(list, prompts))
        with generating(GenerationContext(self._generate, self._attempts)), collected_metrics() as logged:
            result = self._result(arguments)
        groups, metrics = rollout_result(result)
        if not isinstance(groups, list) or not all(isinstance(group, list) and group for group in groups):
            raise self._hook.returned(result, "groups (lists of Samples), or (groups, metrics)")
        if not all(isinstance(sample, Sample) for sample in flatten(groups)):
            raise self._hook.returned(result, "groups whose members are Samples, or (groups, metrics)")
        if prompts is not None:
            self._number(groups, prompts)
        for sample in flatten(groups):
            fill_tokens(
                sample, render=self._attempts.prompt_tokens, tokenizer=self._attempts.tokenizer, name=self._hook.name
            )
            experts: Any = sample.rollout_routed_experts
            sample.rollout_routed_experts = set_routing(experts)
        self._check_groups(groups)
        for group in groups:
            number_executions(group)
        for sample in flatten(groups):
            sample.status = Status.COMPLETED if sample.status is Status.PENDING else sample.status
            sample.weight_versions = sample.weight_versions or list(self._versions)
        return groups, logged | self._check_metrics(metrics)

    def _result(self, arguments: Mapping[str, Any]) -> Any:
        """Return the function's result. A function with a parameter `model` runs in a thread, as `model` blocks."""
        if "model" in self._hook.wanted:
            result = run_on(self._loop, asyncio.to_thread(self._hook.begin, arguments))
        else:
            result = self._hook.begin(arguments)
        return run_on(self._loop, result) if inspect.isawaitable(result) else result

    def _number(self, groups: list[Group], prompts: list[Group]) -> None:
        """Copy numbers, labels and metadata of the prompts to samples that the function created, by position."""
        originals = {id(sample) for sample in flatten(prompts)}
        if all(id(sample) in originals for sample in flatten(groups)):
            return
        sizes, expected = list(map(len, groups)), list(map(len, prompts))
        if sizes != expected:
            raise HookError(
                f"{self._hook.name} returned groups of {sizes} samples for prompts of {expected}. "
                f"Return a group for each prompt, with the same number of samples, in the order of prompts"
            )
        for sample, original in zip(flatten(groups), flatten(prompts), strict=True):
            sample.group_index, sample.index = original.group_index, original.index
            sample.label = original.label if sample.label is None else sample.label
            sample.prompt = sample.prompt or original.prompt
            sample.metadata, sample.extra = original.metadata | sample.metadata, original.extra | sample.extra

    def close(self) -> None:
        """Cancel tasks that the function left running."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            run_on(self._loop, self._attempts.engine.abort())
            run_on(self._loop, asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    @property
    def _params(self) -> SamplingParams:
        return self._attempts.params or sampling_params(self._attempts.settings)

    async def _generate(self, tokens: list[int], values: Any = None) -> Completion:
        params = _sampling_params(self._hook, values, self._params) or self._params
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
        if any(images_of(sample) for sample in flatten(groups)):
            raise HookError(f"{location}: only slimectl can sample prompts with images. Remove the function")
        group_indices = [group[0].group_index for group in groups]
        if len(set(group_indices)) < len(group_indices):
            raise HookError(f"{location}: two groups of a round have the same group_index. Take them from data_source")
        if groups and all(map(_is_unanswered, flatten(groups))):
            raise HookError(
                f"{location} returned samples without responses. Return what attempt(group) returns for each group, or "
                f"append the result of generate(tokens) with sample.append_response_tokens"
            )

    def _check_metrics(self, metrics: Any) -> Metrics:
        metrics = plain_value(metrics)
        fit = isinstance(metrics, dict) and all(
            isinstance(name, str) and is_number(value) for name, value in metrics.items()
        )
        if not fit:
            raise self._hook.returned(metrics, "finite numbers by name as metrics")
        return {name if "/" in name else f"rollout/{name}": float(value) for name, value in metrics.items()}


def _is_unanswered(sample: Sample) -> bool:
    return sample.status is Status.PENDING and not sample.response_length and sample.reward is None
