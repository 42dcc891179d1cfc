"""Single HTTP requests, each on a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp

from slimectl.errors import BackendError
from slimectl.transport.http import Reply, parsed, short

UNREACHABLE = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
"""Errors of a server that is not running, or ends while it answers."""


async def get(url: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Reply:
    """Send a GET request. Raises BackendError if nobody answers in time."""
    return await request("GET", url, timeout_s=timeout_s, headers=headers)


async def request(
    method: str,
    url: str,
    *,
    timeout_s: float,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Send one request on a separate connection. Raises BackendError if nobody answers in time."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, url, json=body, headers=headers) as reply,
        ):
            return Reply(reply.status, parsed(await reply.text()))
    except UNREACHABLE as error:
        raise BackendError(f"{url} is not answering: {short(error)}") from error
