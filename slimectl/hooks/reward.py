"""Calls a user's reward function and validates its rewards."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from slimectl.data.json_values import plain_reward
from slimectl.errors import HookError
from slimectl.hooks.args import FlatSettings
from slimectl.hooks.registry import HOOKS
from slimectl.settings import Settings
from slimectl.types import Sample, detached_copy
from slimectl.user_code import in_one_line

SETTING = "score.custom_rm_path"


class UserReward:
    """A user's reward function, loaded from a path and called with one sample or many.

    Raises HookError if its parameters do not fit.
    """

    def __init__(self, path: str, settings: Settings) -> None:
        self.path, self._hook, self._args = path, HOOKS[SETTING].load(path), FlatSettings(settings)
        function, self.takes_many = self._hook.function, "samples" in self._hook.wanted
        if settings.score.group_rm and not self.takes_many:
            raise HookError(f"{SETTING}: {path}: with score.group_rm it is called with samples; take them or drop that")
        call_method = getattr(function, "__call__", None)  # noqa: B004  an object's own may be async
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)

    def called(self, samples: Sequence[Sample]) -> Any:
        """Return the function's result, or an awaitable of it. It gets copies, so that grading changes no sample."""
        copies = [detached_copy(sample) for sample in samples]
        arguments = {"samples": copies} if self.takes_many else {"sample": copies[0]}
        return self._hook({"args": self._args, "settings": self._args, **arguments})

    def rewards(self, returned: Any, samples: Sequence[Sample]) -> list[Any]:
        """Return one reward per sample. Raises HookError if the number differs."""
        if not self.takes_many:
            return [self._plain(returned, samples[0])]
        try:
            values = returned.tolist() if hasattr(returned, "tolist") else returned
        except Exception as error:
            raise HookError(f"{SETTING}: {self.path}: its rewards: {in_one_line(error)}; return a list") from error
        if not isinstance(values, list | tuple):
            raise HookError(
                f"{SETTING}: {self.path} returned {type(returned).__name__} for {len(samples)} samples; "
                f"return a list, a reward for each"
            )
        if len(values) != len(samples):
            raise HookError(
                f"{SETTING}: {self.path} returned {len(values)} rewards for {len(samples)} samples; return one for each"
            )
        return [self._plain(reward, sample) for reward, sample in zip(values, samples, strict=True)]

    def _plain(self, reward: Any, sample: Sample) -> Any:
        """Return the reward as plain JSON values. Raises HookError, naming the sample, for other values."""
        try:
            return plain_reward(reward)
        except ValueError as error:
            raise HookError(f"{SETTING}: {self.path}: reward of sample {sample.index} {error}") from None
