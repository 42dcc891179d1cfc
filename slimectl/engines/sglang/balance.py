"""Load balancer: selects the server of each request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence

REST_S = 1.0
"""Seconds that a failed server is skipped while others answer."""

REMEMBERED = 8192
"""Maximum number of keys whose server is remembered."""


class Balance:
    """Selects the server with the fewest requests in flight, at most `concurrency` on each.

    With `affinity`, equal keys go to the same server while it is available. Belongs to one event loop.
    """

    def __init__(self, urls: Sequence[str], *, concurrency: int, affinity: bool) -> None:
        self._concurrency, self._affinity = concurrency, affinity
        self._urls = tuple(urls)
        self._in_flight: Counter[str] = Counter()
        self._cooldown_until: dict[str, float] = {}
        self._url_by_key: OrderedDict[int, str] = OrderedDict()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    async def take(self, key: int) -> str:
        """Wait for a server with a free slot and take the slot; `give_back` returns it.

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

    def give_back(self, url: str, *, failed: bool) -> None:
        self._in_flight[url] -= 1
        self._cooldown_until[url] = time.monotonic() + REST_S if failed else 0.0
        self._changed.set()

    def announce(self, urls: Sequence[str]) -> None:
        """Replace the servers."""
        self._urls = tuple(urls)
        self._cooldown_until.clear()
        self._changed.set()

    def knows(self, url: str) -> bool:
        return url in self._urls

    def fail(self, error: BaseException) -> None:
        """Fail all waiting and future `take` calls: no server will come back."""
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
