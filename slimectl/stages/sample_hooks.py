"""A user's functions for attempts and samples: generate functions, sample hooks, all samples of a round."""

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


def as_agent(found: Hook, args: Args) -> Agent:
    """The user's own generate function, with the settings among what it is offered.

    An attempt that raises is a failed sample, whether the function is async or not; one that exits ends the work.
    """

    def asked(offered: Mapping[str, Any]) -> Any:
        return found.attempt({**offered, "args": args, "settings": args})

    asked.resumes = getattr(found.function, "resumes", False)  # type: ignore[attr-defined]
    asked.name = found.name  # type: ignore[attr-defined]
    asked.together = "samples" in found.wanted  # type: ignore[attr-defined]
    return asked


def agent_at(settings: Settings) -> Callable[[str], Agent]:
    """The agent at a path that a sample names.

    Raises HookError where there is none, or one for groups, and RecordError where samples may not name one.
    """

    @cache
    def found(path: str) -> Agent:
        if not settings.rollout.allow_paths_in_records:
            raise RecordError(refused_path("generate_function_path", path))
        agent = as_agent(POINTS[GENERATE].load(path), Args(settings))
        if getattr(agent, "together", False):
            raise HookError(f"{GENERATE}: {path} asks for samples, and a sample names it for itself; ask for sample")
        return agent

    return found


def on_sample(settings: Settings) -> OnSample | None:
    """rollout.sample_hook_path as one function; None where there is none.

    Where the round is not known it is the one that a run would sample the group in, if nothing is filtered.
    """
    found, args = hooks(settings, SAMPLE), Args(settings)
    if not found:
        return None

    async def seen(sample: Sample, rollout_id: int | None, evaluation: bool) -> Sample:
        number = sample.group_index // settings.run.rollout_batch_size + 1 if rollout_id is None else rollout_id
        for each in found:
            offered = {"sample": sample, "rollout_id": number, "evaluation": evaluation}
            made = each({"args": args, "settings": args, **offered})
            made = await made if inspect.isawaitable(made) else made
            if made is not None and not isinstance(made, Sample):
                raise each.returned(made, "a Sample or None")
            sample = sample if made is None else made
            check_lengths(each, sample)
        return sample

    return seen


def check_lengths(by: Hook, sample: Sample) -> None:
    """Raises HookError if the fields of a sample that a hook has touched do not fit together."""
    count = sample.response_length
    for name in ("loss_mask", "rollout_log_probs"):
        values = getattr(sample, name)
        if values is not None and len(values) != count:
            raise HookError(
                f"{by.setting}: {by.path}: sample {sample.index}: {name} has {len(values)} values for {count} response "
                f"tokens; keep them as many"
            )


def process_all(groups: list[Group], source: PromptGroups | OwnGroups, settings: Settings) -> None:
    """Let rollout.all_samples_process_path see the groups of a round, dropped ones too."""
    found = hook(settings, ALL)
    if found is None:
        return
    args = Args(settings)
    made = found({"args": args, "settings": args, "all_samples": groups, "data_source": source})
    if made is not None:
        raise found.returned(made, "nothing")
