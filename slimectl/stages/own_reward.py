"""A reward function of the user's: what it takes, whether it is awaited, and what it may return."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from slimectl.errors import HookError
from slimectl.hooks import POINTS, Args
from slimectl.types import Sample

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
        """What it returns, or the awaitable of that."""
        given = {"samples": list(samples)} if self.together else {"sample": samples[0]}
        return self._hook({"args": args, "settings": args, **given})

    def rewards(self, returned: Any, samples: Sequence[Sample]) -> list[Any]:
        """A reward for each sample. Raises HookError if there are not as many."""
        if not self.together:
            return [_plain(returned)]
        listed = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(listed, list | tuple):
            raise HookError(
                f"{SETTING}: {self.path} returned {type(returned).__name__} for {len(samples)} samples; "
                f"return a list, a reward for each"
            )
        if len(listed) != len(samples):
            raise HookError(
                f"{SETTING}: {self.path} returned {len(listed)} rewards for {len(samples)} samples; return one for each"
            )
        return [_plain(one) for one in listed]


def _plain(reward: Any) -> Any:
    """A number of numpy's or torch's as Python's."""
    if isinstance(reward, dict):
        return {key: _plain(value) for key, value in reward.items()}
    single = not isinstance(reward, int | float) and hasattr(reward, "item") and getattr(reward, "ndim", 1) == 0
    return reward.item() if single else reward
