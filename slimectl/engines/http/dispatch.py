"""Sends requests to servers through a load balancer, and retries failed requests on other servers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from slimectl.engines.api_keys import NO_KEYS, ServerKeys
from slimectl.engines.http.api import ServerApi, generate
from slimectl.engines.http.request import Paused, PendingRequest, Unavailable
from slimectl.errors import BackendError, first_line
from slimectl.system.http import backoff_s, request
from slimectl.types import Completion

COOLDOWN_S = 1.0
"""Seconds to skip a failed server while others are available."""

REMEMBERED = 8192
"""Maximum number of keys whose server is remembered for affinity."""


class LoadBalancer:
    """Selects the server with the fewest requests in flight, up to `concurrency` per server.

    With `affinity`, equal keys go to the same server while it is available. Use it in one event loop only.
    """

    def __init__(self, urls: Sequence[str], *, concurrency: int, affinity: bool) -> None:
        self._concurrency, self._affinity = concurrency, affinity
        self._urls = tuple(urls)
        self._numbers: Mapping[str, int] = {url: number for number, url in enumerate(urls)}
        self._in_flight: Counter[str] = Counter()
        self._cooldown_until: dict[str, float] = {}
        self._url_by_key: OrderedDict[int, str] = OrderedDict()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    async def acquire(self, key: int) -> str:
        """Wait for a server with a free slot and take the slot. `release` returns it.

        Raises the error that was passed to `fail`.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            url = self._choose_url(key)
            if url is not None:
                self._in_flight[url] += 1
                return url
            self._changed.clear()
            await self._changed.wait()

    def release(self, url: str, *, failed: bool) -> None:
        self._in_flight[url] -= 1
        self._cooldown_until[url] = time.monotonic() + COOLDOWN_S if failed else 0.0
        self._changed.set()

    def announce(self, urls: Sequence[str], numbers: Mapping[str, int] | None = None) -> None:
        """Replace the servers. `numbers` are the engines' own."""
        self._urls = tuple(urls)
        self._numbers = numbers or {url: number for number, url in enumerate(urls)}
        self._cooldown_until.clear()
        self._url_by_key.clear()  # or a new server would get only keys that no other one has had
        self._changed.set()

    def in_flight(self) -> dict[str, int]:
        """Return the number of requests by server, where there are any. For any thread."""
        return {url: count for url, count in self._in_flight.copy().items() if count}

    def knows(self, url: str) -> bool:
        return url in self._urls

    def number(self, url: str) -> int:
        """Return the number of a server, or 0 if it is gone or a router."""
        return self._numbers.get(url, 0)

    def fail(self, error: BaseException) -> None:
        """Fail all waiting and future `acquire` calls, because no server will come back."""
        self._failure = error
        self._changed.set()

    def _choose_url(self, key: int) -> str | None:
        now = time.monotonic()
        ready = [url for url in self._urls if self._cooldown_until.get(url, 0.0) <= now] or self._urls
        home = self._url_by_key.get(key) if self._affinity else None
        if home not in ready:
            if not ready:
                return None
            home = min(ready, key=lambda url: self._in_flight[url])
        if home is None or self._in_flight[home] >= self._concurrency:
            return None
        if self._affinity:
            self._url_by_key[key] = home
            self._url_by_key.move_to_end(key)
            if len(self._url_by_key) > REMEMBERED:
                self._url_by_key.popitem(last=False)
        return home


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Bounds of the backoff between tries."""

PAUSED_S = 2.0
"""Maximum seconds between requests to a paused server."""

CONNECT_S = 10.0
ABORT_GRACE_S = 5.0
"""Seconds to wait for the tokens of an aborted request. After that, the tokens received so far are used."""

ABORT_REPLY_S, ABORT_AGAIN_S = 2.0, 0.25

MOVES = 3


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a client sends its requests."""

    concurrency: int = 512
    """Requests in flight per server."""

    affinity: bool = True
    """Whether equal prompts go to the same server."""

    request_timeout_s: float = 14400.0
    connect_timeout_s: float = 120.0
    keys: ServerKeys = NO_KEYS
    moves_aborted: bool = False
    """Whether a response that a server has ended without being asked to is generated again, at most `MOVES` times. A
    server that gets SIGTERM ends its responses."""

    shared: bool = False
    """Whether other clients use the servers, so that an abort must not touch their requests."""


class Dispatch:
    """Retries requests until a server completes them. Calls `troubled` with failed (not paused) servers."""

    def __init__(
        self, balance: LoadBalancer, api: ServerApi, options: ClientOptions, *, troubled: Callable[[str], object]
    ) -> None:
        self.balance, self._api, self._options, self._troubled = balance, api, options, troubled
        self._moves = MOVES if options.moves_aborted else 0
        self._flights: dict[int, tuple[PendingRequest, asyncio.Task[Completion]]] = {}
        self._asking: dict[int, tuple[str, asyncio.Timeout]] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )

    async def complete(self, flight: PendingRequest) -> Completion:
        """Return the completion of a request. Raises SettingsError or BackendError if it cannot be completed."""
        task = asyncio.current_task()
        assert task is not None
        self._flights[id(flight)] = flight, task
        try:
            await self._ask_until_answered(flight)
            return flight.completion()
        except asyncio.CancelledError:
            if not flight.aborted:
                raise
            return flight.completion("abort")
        finally:
            del self._flights[id(flight)]

    async def abort(self, workers: Sequence[str]) -> None:
        """Abort all requests. Those without a server end at once. The others return their tokens so far."""
        pending = set()
        for flight, task in list(self._flights.values()):
            flight.aborted = True
            pending.add(task)
            if not flight.asking:
                task.cancel()
        deadline = time.monotonic() + ABORT_GRACE_S
        while pending and time.monotonic() < deadline:
            await asyncio.gather(*(self._abort_at(url, workers) for url in workers))
            # Repeat, because a request may reach its server after the previous abort.
            _, pending = await asyncio.wait(pending, timeout=ABORT_AGAIN_S)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)

    async def _abort_at(self, url: str, workers: Sequence[str]) -> None:
        """Abort the requests at one of the workers. A request behind a router may be at any worker."""
        ids = None
        if self._options.shared:
            places = ((flight, self._asking.get(id(flight), (None,))[0]) for flight, _ in self._flights.values())
            ids = [flight.request_id for flight, place in places if place == url or place not in (None, *workers)]
        requests = self._api.abort_requests(ids)
        await asyncio.gather(*(_post(url, path, body, self._options.keys) for path, body in requests))

    def announce(
        self, urls: Sequence[str], leaving: Sequence[str] = (), numbers: Mapping[str, int] | None = None
    ) -> None:
        """Replace the servers, which have these numbers.

        Requests on removed servers are retried, because a lost machine does not report errors. Those on servers that
        are `leaving` may finish.
        """
        self.balance.announce(urls, numbers)
        for url, limit in self._asking.values():
            if url not in urls and url not in leaving and not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        await self._session.close()

    async def _ask_until_answered(self, flight: PendingRequest) -> None:
        """Retry a request until it is complete.

        Raises BackendError if no server responds for `connect_timeout_s`, not counting the wait for new servers.
        """
        tries, silent_s, started, moves = 0, 0.0, time.monotonic(), 0
        while True:
            url = await self.balance.acquire(flight.key)
            try_started = time.monotonic()
            failure = await self._try_server(url, flight)
            if failure is None and flight.finish == "abort" and not flight.aborted and moves < self._moves:
                moves += 1
                failure = Unavailable("the server has ended the request")
            if failure is None:
                return
            if isinstance(failure, Paused):
                # The server is alive and continues once weights are loaded or the GPU is free, so its pause does not
                # count.
                if time.monotonic() - started > self._options.request_timeout_s:
                    raise BackendError(f"engine at {url}: {failure} (engine.request_timeout_s)") from failure
                await asyncio.sleep(random.uniform(FIRST_PAUSE_S, PAUSED_S))
                continue
            await asyncio.to_thread(self._troubled, url)
            if flight.tokens:
                tries, silent_s = 0, 0.0
            tries += 1
            # After the time of a connection, the server was not silent: it had the request until it was lost.
            silent_s += min(CONNECT_S, time.monotonic() - try_started)
            if silent_s >= self._options.connect_timeout_s:
                raise BackendError(
                    f"engine at {url} is not answering ({tries} tries, {silent_s:.0f} s): {first_line(failure)}. "
                    f"Start one with `slimectl serve`."
                ) from failure
            pause_s = backoff_s(tries, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
            silent_s += pause_s
            await asyncio.sleep(pause_s)

    async def _try_server(self, url: str, flight: PendingRequest) -> Exception | None:
        """Try one server. Return None if it completes the request, else an error after which a retry may succeed."""
        failure: Exception | None = None
        flight.restart()
        flight.engine, flight.asking = self.balance.number(url), True
        try:
            async with asyncio.timeout(self._options.request_timeout_s) as limit:
                self._asking[id(flight)] = url, limit
                headers = self._options.keys.headers(url, self._api.generate_path)
                await generate(self._session, url, flight, api=self._api, headers=headers)
        except (aiohttp.ClientError, TimeoutError, OSError, Unavailable) as error:
            if limit.expired() and self.balance.knows(url):
                raise BackendError(
                    f"engine at {url} did not complete the request within {self._options.request_timeout_s:.0f} s "
                    f"(engine.request_timeout_s)"
                ) from error
            failure = error
        finally:
            flight.asking = False
            del self._asking[id(flight)]
            self.balance.release(url, failed=failure is not None)
        return failure


async def _post(url: str, path: str, body: Mapping[str, Any], keys: ServerKeys) -> None:
    """Send a request and ignore errors."""
    with contextlib.suppress(BackendError):
        await request("POST", url + path, timeout_s=ABORT_REPLY_S, body=body, headers=keys.headers(url, path))
