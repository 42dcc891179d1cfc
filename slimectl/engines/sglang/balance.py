"""Which server gets the next request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence

REST_S = 1.0
"""How long a server that failed is passed over while others answer."""

REMEMBERED = 8192
"""Sessions whose server is remembered."""


class Balance:
    """The one with the fewest requests in flight; equal keys go to the same one while it is there, and none gets more
    than `concurrency` at a time. Belongs to one event loop.
    """

    def __init__(self, urls: Sequence[str], *, concurrency: int, affinity: bool) -> None:
        self._concurrency, self._affinity = concurrency, affinity
        self._urls = tuple(urls)
        self._in_flight: Counter[str] = Counter()
        self._rests_until: dict[str, float] = {}
        self._homes: OrderedDict[int, str] = OrderedDict()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    async def take(self, key: int) -> str:
        """A server to ask, once there is one with room: none may be there for a while. Give it back afterwards.

        Raises what `fail` was told.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            url = self._choice(key)
            if url is not None:
                self._in_flight[url] += 1
                return url
            self._changed.clear()
            await self._changed.wait()

    def give_back(self, url: str, *, failed: bool) -> None:
        self._in_flight[url] -= 1
        self._rests_until[url] = time.monotonic() + REST_S if failed else 0.0
        self._changed.set()

    def announce(self, urls: Sequence[str]) -> None:
        """From now on these are asked, and no other."""
        self._urls = tuple(urls)
        self._rests_until.clear()
        self._changed.set()

    def knows(self, url: str) -> bool:
        return url in self._urls

    def fail(self, error: BaseException) -> None:
        """There will be no more servers: nobody need wait."""
        self._failure = error
        self._changed.set()

    def _choice(self, key: int) -> str | None:
        now = time.monotonic()
        ready = [url for url in self._urls if self._rests_until.get(url, 0.0) <= now] or self._urls
        home = self._homes.get(key) if self._affinity else None
        if home not in ready:
            if not ready:
                return None
            home = min(ready, key=lambda url: self._in_flight[url])
        if home is None or self._in_flight[home] >= self._concurrency:
            return None
        if self._affinity:
            self._homes[key] = home
            self._homes.move_to_end(key)
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        return home
