"""HTTP requests to one server, each on its own connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from slimectl.errors import BackendError

UNREACHABLE = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
"""Errors of a server that is not running, or ends while it answers."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: Any

    @property
    def words(self) -> str:
        """Error message of the server, in one line."""
        return words_of(self.body)


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


def parsed(text: str) -> Any:
    """Parse JSON; returns the text if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def words_of(body: Any) -> str:
    """Return the message in an error's body: SGLang, its router and OpenAI each use another field for it."""
    while isinstance(body, dict):
        body = next((body[key] for key in ("error", "message", "detail") if body.get(key)), str(dict(body)))
    return (str(body).strip().splitlines() or ["no reason given"])[0][:300]


def short(error: BaseException) -> str:
    """Return the first line of an error, or its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
