"""User functions for samples: generate functions, sample hooks, and hooks for all samples of a round."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from slimectl.data.records import refused_path
from slimectl.errors import HookError, RecordError
from slimectl.hooks import POINTS, Args, Hook, hook, hooks
from slimectl.ports import Agent, OnSample
from slimectl.settings import Settings
from slimectl.stages.groups import OwnGroups, PromptGroups
from slimectl.stages.underway import Group
from slimectl.types import Sample

SAMPLE, ALL = "rollout.sample_hook_path", "rollout.all_samples_process_path"
GENERATE = "rollout.custom_generate_function_path"


def as_agent(function: Hook, args: Args) -> Agent:
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
        agent = as_agent(POINTS[GENERATE].load(path), Args(settings))
        if getattr(agent, "together", False):
            raise HookError(f"{GENERATE}: {path} asks for samples, and a sample names it for itself; ask for sample")
        return agent

    return load


def on_sample(settings: Settings) -> OnSample | None:
    """Return the functions of rollout.sample_hook_path as one function; None if there are none.

    An unknown round is taken to be the one in which a run without filters would sample the group.
    """
    functions, args = hooks(settings, SAMPLE), Args(settings)
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


def process_all(groups: list[Group], source: PromptGroups | OwnGroups, settings: Settings) -> None:
    """Call rollout.all_samples_process_path with the groups of a round, dropped ones included."""
    function = hook(settings, ALL)
    if function is None:
        return
    args = Args(settings)
    result = function({"args": args, "settings": args, "all_samples": groups, "data_source": source})
    if result is not None:
        raise function.returned(result, "nothing")
