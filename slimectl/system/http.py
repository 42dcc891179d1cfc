"""Single HTTP requests and their responses: JSON, error messages, and when to retry."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimectl.errors import BackendError, first_line

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses that are worth a retry."""

LONGEST_MESSAGE = 500
SEND_S = 60.0
"""Seconds that a client may go without reading a stream."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Response of a server: the status, and the body, parsed if it is JSON."""

    status: int
    body: Any

    @property
    def message(self) -> str:
        """Error message of the server, in one line."""
        return error_message(self.body)


def parsed(text: str) -> Any:
    """Parse JSON. Returns the text if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def error_message(body: Any) -> str:
    """Return the message in an error's body, on one line. SGLang, its router and OpenAI each use a different field."""
    while isinstance(body, dict):
        body = next((body[key] for key in ("error", "message", "detail") if body.get(key)), str(dict(body)))
    return " ".join(str(body).split())[:LONGEST_MESSAGE] or "no reason given"


def backoff_s(tries: int, *, first_s: float, longest_s: float) -> float:
    """Return the pause after this many failed tries, with jitter, so that clients that failed together retry apart.

    It is 50 to 100 % of `first_s`, twice that, four times that, … up to `longest_s`.
    """
    return min(longest_s, first_s * 2.0 ** (tries - 1)) * random.uniform(0.5, 1.0)


async def get(url: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Reply:
    """Send a GET request. Raises BackendError if there is no response in time."""
    return await request("GET", url, timeout_s=timeout_s, headers=headers)


async def request(
    method: str,
    url: str,
    *,
    timeout_s: float,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Send one request on a separate connection. Raises BackendError if there is no response in time."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, url, json=body, headers=headers) as reply,
        ):
            return Reply(reply.status, parsed(await reply.text()))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BackendError(f"{url} is not answering: {first_line(error)}") from error


async def send_part(response: Any, text: str) -> None:
    """Write a part of aiohttp's stream response. Raises ConnectionResetError if the client reads nothing."""
    try:
        async with asyncio.timeout(SEND_S):
            await response.write(text.encode())
    except TimeoutError:
        raise ConnectionResetError(f"the client has read nothing for {SEND_S:.0f} s") from None
