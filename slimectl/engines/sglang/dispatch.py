"""Requests in flight, until each has its answer; lives in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence

import aiohttp

from slimectl.engines.keys import Keys
from slimectl.engines.sglang.asking import NO_KEYS
from slimectl.engines.sglang.balance import Balance
from slimectl.engines.sglang.request import Flight, Paused, Unavailable
from slimectl.engines.sglang.stream import ask
from slimectl.engines.sglang.wire import UNREACHABLE, request, short
from slimectl.errors import BackendError
from slimectl.types import Completion

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses between tries double from one to the other; each is drawn uniformly from zero to there."""

PAUSED_S = 2.0
"""How long one at most waits before a paused server is asked again."""

CONNECT_S = 10.0
ABORT_GRACE_S = 5.0
"""How long servers may take to hand over what an aborted request has; then what came until now counts."""

ABORT_REPLY_S, ABORT_AGAIN_S = 2.0, 0.25


class Dispatch:
    """Asks servers until one has answered whole. `troubled` hears of each that failed; one that is paused has not."""

    def __init__(
        self,
        balance: Balance,
        *,
        request_timeout_s: float,
        connect_timeout_s: float,
        troubled: Callable[[str], None],
        keys: Keys = NO_KEYS,
    ) -> None:
        self.balance = balance
        self._request_timeout_s, self._connect_timeout_s = request_timeout_s, connect_timeout_s
        self._troubled, self._keys = troubled, keys
        self._flights: dict[int, tuple[Flight, asyncio.Task[Completion]]] = {}
        self._asking: dict[int, tuple[str, asyncio.Timeout]] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )

    async def complete(self, flight: Flight) -> Completion:
        """Raises SettingsError or BackendError where there will be no answer."""
        task = asyncio.current_task()
        assert task is not None
        self._flights[id(flight)] = flight, task
        try:
            await self._answered(flight)
            return flight.completion()
        except asyncio.CancelledError:
            if not flight.aborted:
                raise
            return flight.completion("abort")
        finally:
            del self._flights[id(flight)]

    async def abort(self, workers: Sequence[str]) -> None:
        """Servers hand over what they have; who waits for a server, or has a silent one, returns at once."""
        pending = set()
        for flight, task in list(self._flights.values()):
            flight.aborted = True
            pending.add(task)
            if not flight.asking:
                task.cancel()
        deadline = time.monotonic() + ABORT_GRACE_S
        while pending and time.monotonic() < deadline:
            await asyncio.gather(*(_abort_at(url, self._keys) for url in workers))
            # Asked again: a request that a server had not yet seen was not among those it ended.
            _, pending = await asyncio.wait(pending, timeout=ABORT_AGAIN_S)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)

    def announce(self, urls: Sequence[str]) -> None:
        """From now on these are asked; what others were asked is asked again: a machine that is lost says nothing."""
        self.balance.announce(urls)
        for url, limit in self._asking.values():
            if url not in urls and not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        await self._session.close()

    async def _answered(self, flight: Flight) -> None:
        """Raises BackendError once no server has answered for `connect_timeout_s`; waiting for one to be named is not
        counted.
        """
        tries, silent_s, started = 0, 0.0, time.monotonic()
        while True:
            url = await self.balance.take(flight.key)
            begun = time.monotonic()
            failure = await self._tried(url, flight)
            if failure is None:
                return
            if isinstance(failure, Paused):
                # It lives, and goes on when weights have come or another has its turn: that is no silence.
                if time.monotonic() - started > self._request_timeout_s:
                    raise BackendError(f"engine at {url}: {failure} (engine.request_timeout_s)") from failure
                await asyncio.sleep(random.uniform(FIRST_PAUSE_S, PAUSED_S))
                continue
            await asyncio.to_thread(self._troubled, url)
            if flight.tokens:
                tries, silent_s = 0, 0.0
            tries += 1
            silent_s += time.monotonic() - begun
            if silent_s >= self._connect_timeout_s:
                raise BackendError(
                    f"engine at {url} is not answering ({tries} tries, {silent_s:.0f} s): {short(failure)}; "
                    f"start one with `slimectl serve`"
                ) from failure
            pause_s = random.uniform(0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**tries))
            silent_s += pause_s
            await asyncio.sleep(pause_s)

    async def _tried(self, url: str, flight: Flight) -> Exception | None:
        """None with an answer, else why another try may do."""
        failure: Exception | None = None
        flight.restart()
        flight.asking = True
        try:
            async with asyncio.timeout(self._request_timeout_s) as limit:
                self._asking[id(flight)] = url, limit
                await ask(self._session, url, flight, headers=self._keys.headers(url, "/generate"))
        except (*UNREACHABLE, Unavailable) as error:
            if limit.expired() and self.balance.knows(url):
                raise BackendError(
                    f"engine at {url}: no whole answer within {self._request_timeout_s:.0f} s "
                    f"(engine.request_timeout_s)"
                ) from error
            failure = error
        finally:
            flight.asking = False
            del self._asking[id(flight)]
            self.balance.give_back(url, failed=failure is not None)
        return failure


async def _abort_at(url: str, keys: Keys) -> None:
    with contextlib.suppress(BackendError):
        body = {"rid": "", "abort_all": True}
        headers = keys.headers(url, "/abort_request")
        await request("POST", f"{url}/abort_request", timeout_s=ABORT_REPLY_S, body=body, headers=headers)
