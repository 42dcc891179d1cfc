"""Event loop in a separate thread, for connections that outlive the event loops of their users."""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
import json
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from slimectl.engines.api_keys import Keys
from slimectl.errors import BackendError

Result = TypeVar("Result")


class Background:
    """Event loop thread that the first coroutine starts; may be used again after `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def runs(self) -> bool:
        return self._loop is not None

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Schedule a coroutine; returns a future for any thread. Cancelling it cancels the coroutine."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancel all running coroutines and end the thread."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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


Json = Mapping[str, Any] | bytes
"""Request body, or the object to encode as one."""

CONNECT_TIMEOUT_S = 10.0
LONGEST_WORDS = 500
NO_KEYS = Keys()


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
        body = self.body
        if isinstance(body, dict):
            body = body.get("message") or body.get("error") or body.get("detail") or body
        if isinstance(body, dict):
            body = body.get("message") or body
        return " ".join(str(body).split())[:LONGEST_WORDS]

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
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = text
    return Answer(url, path.partition("?")[0], response.status, parsed)


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
