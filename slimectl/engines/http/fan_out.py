"""Sends one request to several servers at once, and collects their answers."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from slimectl.engines.api_keys import NO_KEYS, Keys
from slimectl.errors import BackendError
from slimectl.transport.answers import error_message, parsed

Json = Mapping[str, Any] | bytes
"""Request body, or the object to encode as one."""

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Response of a worker: the status, and the body, parsed if it is JSON."""

    url: str
    path: str
    status: int
    body: Any

    @property
    def words(self) -> str:
        """Error message of the worker, in one line."""
        return error_message(self.body)

    @property
    def refused(self) -> bool:
        return self.status >= 400 or (isinstance(self.body, dict) and self.body.get("success") is False)

    def error(self) -> BackendError:
        hint = "; give its key by engine.admin_api_key and engine.api_key" if self.status == 401 else ""
        return BackendError(f"engine at {self.url}: {self.path} was refused ({self.status}): {self.words}{hint}")


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    path: str,
    body: Json,
    *,
    method: str = "POST",
    keys: Keys = NO_KEYS,
) -> Answer:
    # Not as bytes: aiohttp would send a large body in one piece and block the loop.
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    data = io.BytesIO(payload) if method == "POST" else None
    headers = {"Content-Type": "application/json", **keys.headers(url, path)}
    try:
        async with session.request(method, url + path, data=data, headers=headers) as response:
            text = await response.text()
    except aiohttp.ClientConnectorError as error:
        code = error.errno or 0
        reason = os.strerror(code) if code > 0 else str(error.os_error)  # no address has none
        raise BackendError(f"engine at {url} is not there: {reason}; has it died? see its log") from error
    except (aiohttp.ClientError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise BackendError(f"engine at {url} went away in {path} ({reason}): it has died; see its log") from error
    return Answer(url, path.partition("?")[0], response.status, parsed(text))


def ask_all(
    question: Callable[[aiohttp.ClientSession, str], Coroutine[Any, Any, Any]], urls: Sequence[str], *, limit_s: float
) -> list[Any]:
    """Run `question` for every URL concurrently; returns all results, exceptions in their places.

    A server that is not running, or takes longer than `limit_s`, gives a BackendError.
    """

    async def ask_one(session: aiohttp.ClientSession, url: str) -> Any:
        try:
            return await asyncio.wait_for(question(session, url), limit_s)
        except TimeoutError:
            raise BackendError(
                f"engine at {url} has not answered within {limit_s:g} s; look at its log, or raise sync.timeout_s"
            ) from None

    async def ask_each() -> list[Any]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return await asyncio.gather(*(ask_one(session, url) for url in urls), return_exceptions=True)

    return asyncio.run(ask_each())
