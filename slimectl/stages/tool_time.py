"""Time limit for an agent's tools: a tool that hangs must not block a round."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

TICKS = 20
"""Number of checks per time limit."""


class ToolTime:
    """Limits the seconds that one attempt spends outside of the model since its last answer.

    Time is counted in ticks of its event loop: no time passes while the loop is stopped because no consumer waits for
    samples.
    """

    def __init__(self, generate: Callable[..., Awaitable[Any]], limit_s: float) -> None:
        self._generate = generate
        self._limit_s = limit_s
        self._pending_requests = 0
        self._spent_s = 0.0

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Forward a request to the engine; its time does not count as tool time."""
        self._pending_requests += 1
        try:
            return await self._generate(*args, **kwargs)
        finally:
            self._pending_requests -= 1
            self._spent_s = 0.0

    async def result(self, work: Awaitable[Any]) -> Any:
        """Return the agent's result. Raises TimeoutError, and cancels the agent, when its tools exceed the limit."""
        task = asyncio.ensure_future(work)
        tick_s = self._limit_s / TICKS
        try:
            while not (await asyncio.wait({task}, timeout=tick_s))[0]:
                self._spent_s += 0.0 if self._pending_requests else tick_s
                if self._spent_s >= self._limit_s:
                    raise TimeoutError(
                        f"its tools took more than rollout.tool_timeout_s: {self._limit_s:g} s; mend them, or raise it"
                    )
            return task.result()
        finally:
            task.cancel()
