"""What hosts everywhere do with the objects that they hold."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any


def close_hosted(hosted: Any) -> None:
    """Close what can be closed, be it by a function or a coroutine."""
    close = getattr(hosted, "close", None)
    if close is not None and inspect.isawaitable(closing := close()):
        asyncio.run(_awaited(closing))


async def _awaited(closing: Any) -> None:
    await closing
