"""A limit for what an agent does beside the model: tools that hang must not hold up a round."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

TICKS = 20
"""How often one limit is looked at."""


class ToolTime:
    """The seconds that one attempt spends outside of the model since its last answer.

    Counted in ticks of the loop in which it runs: while that loop stands still, because nobody waits for samples, no
    time passes.
    """

    def __init__(self, generate: Callable[..., Awaitable[Any]], limit_s: float) -> None:
        self._generate = generate
        self._limit_s = limit_s
        self._asking = 0
        self._spent_s = 0.0

    async def generate(self, *given: Any, **named: Any) -> Any:
        """The engine's answer; the time that it takes is not the tool's."""
        self._asking += 1
        try:
            return await self._generate(*given, **named)
        finally:
            self._asking -= 1
            self._spent_s = 0.0

    async def result(self, work: Awaitable[Any]) -> Any:
        """What the agent returns. Raises TimeoutError when its tools have overrun the limit; it is cancelled then."""
        task = asyncio.ensure_future(work)
        tick_s = self._limit_s / TICKS
        try:
            while not (await asyncio.wait({task}, timeout=tick_s))[0]:
                self._spent_s += 0.0 if self._asking else tick_s
                if self._spent_s >= self._limit_s:
                    raise TimeoutError(
                        f"its tools took more than rollout.tool_timeout_s: {self._limit_s:g} s; mend them, or raise it"
                    )
            return task.result()
        finally:
            task.cancel()
