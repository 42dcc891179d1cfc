"""Closes hosted objects, for every executor."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any


def close_hosted(hosted: Any) -> None:
    """Call the object's `close`, if it has one; a coroutine is awaited."""
    close = getattr(hosted, "close", None)
    if close is not None and inspect.isawaitable(awaitable := close()):
        asyncio.run(_await(awaitable))


async def _await(awaitable: Any) -> None:
    await awaitable
