"""Turns a user's reward function into a verifier, used alone or as a part of a sum."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from slimectl.rewards.base import Grade, Verifier
from slimectl.types import Sample

if TYPE_CHECKING:
    from slimectl.system.client import HttpClient


class RewardFunction(Protocol):
    """A user's reward function, called with one sample or with many."""

    @property
    def name(self) -> str:
        """Setting and path of the function, for error messages."""
        ...

    @property
    def path(self) -> str: ...

    @property
    def takes_many(self) -> bool:
        """Whether it is called with many samples."""
        ...

    @property
    def is_async(self) -> bool:
        """Whether it is async."""
        ...

    def called(self, samples: Sequence[Sample]) -> Any:
        """Return the function's result, or an awaitable of the result."""
        ...

    def rewards(self, returned: Any, samples: Sequence[Sample]) -> list[Any]:
        """Return one reward per sample. Raises HookError if the result does not have one for each."""
        ...


class UserFunction(Verifier):
    """Grades with a user's function. It gets up to `batch_size` samples, or all siblings with `group_rm`.

    A function with time limits (`limited`) is graded in worker processes, unless it is asynchronous.
    """

    bounds = (-math.inf, math.inf)
    runs_user_code = True

    def __init__(self, function: RewardFunction, *, batch_size: int, group_rm: bool, limited: bool = False) -> None:
        self.function, self._limited = function, limited
        self._most = sys.maxsize if group_rm else batch_size
        self._lock = threading.Lock()

    @property
    def is_async(self) -> bool:
        return self.function.is_async

    @property
    def slow(self) -> bool:
        return self._limited and not self.is_async

    @property
    def together(self) -> int:
        return self._most if self.function.takes_many else 1

    @property
    def takes_groups(self) -> bool:
        return self.function.takes_many

    def explain(self, sample: Sample) -> Grade:
        return self.grade_all([sample])[0]

    def grade_all(self, samples: Sequence[Sample]) -> list[Grade]:
        from slimectl.system.client import run_sync

        result = self.function.called(samples)
        if inspect.isawaitable(result):
            awaitable = result
            result = run_sync(lambda http: awaitable)
        return self._grades(result, samples)

    async def grade_async(self, samples: Sequence[Sample], http: HttpClient) -> list[Grade]:
        """Await an async function. Call any other in a thread, where it may block, one call at a time."""
        called = self.function.called(samples) if self.is_async else await asyncio.to_thread(self._called, samples)
        return self._grades(await called if inspect.isawaitable(called) else called, samples)

    def extract(self, sample: Sample) -> str | None:
        return None

    def _called(self, samples: Sequence[Sample]) -> Any:
        with self._lock:
            return self.function.called(samples)

    def _grades(self, returned: Any, samples: Sequence[Sample]) -> list[Grade]:
        rewards = self.function.rewards(returned, samples)
        return [Grade(reward, "whole sample", f"{self.function.path} returned {reward!r}") for reward in rewards]
