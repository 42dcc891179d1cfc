"""A reward function of the user's: what it takes, whether it is awaited, and what it may return."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from slimectl.data.plain import plain_reward
from slimectl.errors import HookError
from slimectl.hooks import POINTS, Args, in_one_line
from slimectl.types import Sample, detached_copy

SETTING = "score.custom_rm_path"


class Own:
    """The function at a path, called with a sample or with many. Raises HookError if it is not fit for that."""

    def __init__(self, path: str, *, group_rm: bool) -> None:
        self.path, self._hook = path, POINTS[SETTING].load(path)
        function, self.together = self._hook.function, "samples" in self._hook.wanted
        if group_rm and not self.together:
            raise HookError(f"{SETTING}: {path}: with score.group_rm it is called with samples; take them or drop that")
        called = getattr(function, "__call__", None)  # noqa: B004  an object's own may be async
        self.waits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)

    def called(self, samples: Sequence[Sample], args: Args) -> Any:
        """What it returns, or the awaitable of that. It gets copies: a sample is the same whoever graded it."""
        copies = [detached_copy(sample) for sample in samples]
        given = {"samples": copies} if self.together else {"sample": copies[0]}
        return self._hook({"args": args, "settings": args, **given})

    def rewards(self, returned: Any, samples: Sequence[Sample]) -> list[Any]:
        """A reward for each sample. Raises HookError if there are not as many."""
        if not self.together:
            return [self._plain(returned, samples[0])]
        try:
            listed = returned.tolist() if hasattr(returned, "tolist") else returned
        except Exception as error:
            raise HookError(f"{SETTING}: {self.path}: its rewards: {in_one_line(error)}; return a list") from error
        if not isinstance(listed, list | tuple):
            raise HookError(
                f"{SETTING}: {self.path} returned {type(returned).__name__} for {len(samples)} samples; "
                f"return a list, a reward for each"
            )
        if len(listed) != len(samples):
            raise HookError(
                f"{SETTING}: {self.path} returned {len(listed)} rewards for {len(samples)} samples; return one for each"
            )
        return [self._plain(reward, sample) for reward, sample in zip(listed, samples, strict=True)]

    def _plain(self, reward: Any, sample: Sample) -> Any:
        """The reward as JSON has it. Raises HookError with the sample, for what JSON has no word for."""
        try:
            return plain_reward(reward)
        except ValueError as error:
            raise HookError(f"{SETTING}: {self.path}: reward of sample {sample.index} {error}") from None
