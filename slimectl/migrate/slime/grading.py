"""Rewards of samples as set in `[score]`, for functions of slime that grade samples themselves."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from functools import cache
from typing import Any

from slimectl.errors import HookError, SettingsError
from slimectl.hooks.args import settings_of
from slimectl.rewards import Verifier, verifier
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.stages.score import Grader
from slimectl.types import Sample

_graders: dict[int, tuple[Settings, Grader]] = {}
"""Settings and their grader, by the id of the settings. The settings are kept so that the id is not reused."""
MAX_GRADERS = 8
_is_grading: ContextVar[bool] = ContextVar("is_grading", default=False)


def _grader(args: Any) -> Grader:
    settings = settings_of(args)
    if id(settings) not in _graders:
        if len(_graders) >= MAX_GRADERS:
            _graders.clear()
        _graders[id(settings)] = settings, builders.reward(settings)
    return _graders[id(settings)][1]


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """Return the reward of a sample: by its own function, or else [score], metadata.rm_type, or rm_type."""
    return (await batched_async_rm(args, [sample]))[0]


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """Return the rewards of samples, in order. They are not written into the samples.

    Raises HookError if the reward function of the settings calls it, because that would never end.
    """
    if _is_grading.get():
        raise HookError(
            "async_rm calls the reward function of the settings, and this function calls async_rm. Call a grader "
            "instead, such as slime.rollout.rm_hub.grade_answer_verl."
        )
    grader = _grader(args)
    token = _is_grading.set(True)
    try:
        calls = await asyncio.gather(*(asyncio.to_thread(grader.grade, call) for call in grader.calls(samples)))
    finally:
        _is_grading.reset(token)
    return [getattr(reward, "reward", reward) for rewards in calls for reward in rewards]


@cache
def _remote(url: str, max_retries: int) -> Verifier:
    return verifier("remote_rm", url=url, max_retries=max_retries)


async def remote_rm(args: Any, sample: Sample, max_retries: int = 10) -> Any:
    """Return the reward from the server at args.rm_url, after at most `max_retries` requests.

    Raises SettingsError if no address is set, and BackendError if the server does not answer.
    """
    url = settings_of(args).score.rm_url
    if not url:
        raise SettingsError("score.rm_url: no address is set. remote_rm needs the server of the reward.")
    return await asyncio.to_thread(_remote(url, max_retries - 1), sample)
