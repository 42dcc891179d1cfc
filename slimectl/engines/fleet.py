"""Several servers, kept alive: one that dies or hangs is withdrawn, restarted, given the weights, and announced."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from slimectl.engines.members import Front, Member, Server, has_weights, healthy, last_words, lives, say, stopped
from slimectl.errors import BackendError

Announce = Callable[[Sequence[str], Sequence[str]], None]

LOOK_S = 1.0
"""Between two looks at whether the processes live; whether they answer is asked every `interval_s`."""

LEAVE_S = 10.0
"""How long the threads of a fleet get to see that it is closed."""


class NoRestartLeft(BackendError):
    """A server died when all restarts were used."""


class Fleet:
    """`count` servers from `make(i)`, behind `router` if there is one (`kinds[i]` is what it must know of each).

    `announce(addresses, workers)` hears where requests may go, whenever that changes; a restarted server is in it only
    after `restore(url)` has brought it the current weights. `failed` hears the error after which nothing is mended any
    more: a server died when all of the `max_restarts` were used. Servers are looked at every `interval_s` and given
    `timeout_s` to answer.
    """

    def __init__(
        self,
        make: Callable[[int], Server],
        count: int,
        *,
        router: Front | None = None,
        kinds: Sequence[Mapping[str, Any]] | None = None,
        interval_s: float = 30.0,
        timeout_s: float = 30.0,
        first_wait_s: float = 0.0,
        max_restarts: int = 10,
        watch: bool = True,
        announce: Announce | None = None,
        restore: Callable[[str], None] | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.announce, self.restore, self.failed = announce, restore, failed
        self.restarts = 0
        self._make, self._router, self._router_url = make, router, ""
        self._interval_s, self._timeout_s, self._first_wait_s = interval_s, timeout_s, first_wait_s
        self._max_restarts, self._watch = max_restarts, watch
        self._members = [Member(make(i), kinds[i] if kinds else {}) for i in range(count)]
        self._failure: BaseException | None = None
        self._weights = threading.RLock()  # held while weights change: by the trainer for all, by a repair for one
        self._changing = threading.RLock()
        self._look_now, self._closing = threading.Event(), threading.Event()
        self._repairs: list[threading.Thread] = []
        self._monitor: threading.Thread | None = None

    @property
    def urls(self) -> list[str]:
        """The servers that answer."""
        return [member.url for member in self._members if member.up]

    @property
    def addresses(self) -> list[str]:
        """Where requests go: the router, else the servers; nowhere while none answers."""
        return [self._router_url] if self._router is not None and self.urls else self.urls

    def start(self) -> None:
        """Start all at once. Raises the first error; then nothing is left running."""
        parts = self._parts()
        pool = ThreadPoolExecutor(max_workers=len(parts))
        try:
            begun = [pool.submit(self._started, part) for part in parts]
            for done in as_completed(begun):
                done.result()
            for member, start in zip(self._members, begun, strict=False):
                member.url, member.up = start.result(), True
            if self._router is not None:
                self._router_url = begun[-1].result()
                self._route()
        except BaseException:
            self.close()  # which ends what is still starting
            raise
        finally:
            pool.shutdown()
        self._tell()
        if self._watch:
            self._monitor = threading.Thread(target=self._monitored, name="slimectl-fleet", daemon=True)
            self._monitor.start()

    def look(self, _url: str = "") -> None:
        """Look at the servers soon, rather than after the interval: something is wrong."""
        self._look_now.set()

    def settle(self) -> None:
        """Look at the servers now; returns when all of them answer again. Raises BackendError if that will not be.

        Not within `pause_watch`: repairs bring weights.
        """
        self._examine()
        for thread in list(self._repairs):
            thread.join()
        self.check()

    def check(self) -> None:
        """Raises the error after which nothing is mended any more."""
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def pause_watch(self) -> Iterator[None]:
        """While weights change: who loads is not taken to hang, and no repair brings weights at the same time."""
        with self._weights:
            yield
            with self._changing:
                self._route()

    def close(self) -> None:
        """End the servers and the watch over them."""
        self._closing.set()
        self._look_now.set()
        self._stop_all()
        for thread in [*self._repairs, *([self._monitor] if self._monitor is not None else [])]:
            thread.join(LEAVE_S)
        self._stop_all()  # what a repair had begun to start at that moment
        for member in self._members:
            member.up = False

    def _stop_all(self) -> None:
        with ThreadPoolExecutor(max_workers=len(self._members) + 1) as pool:
            list(pool.map(stopped, self._parts()))

    def _parts(self) -> list[Server]:
        servers: list[Server] = [member.server for member in self._members]
        return [*servers, *([self._router] if self._router is not None else [])]

    def _started(self, part: Server) -> str:
        if self._closing.is_set():
            raise BackendError("the fleet is being closed")
        return part.start()

    def _monitored(self) -> None:
        self._closing.wait(self._first_wait_s)
        asked = time.monotonic()
        while not self._closing.is_set():
            told = self._look_now.wait(min(self._interval_s, LOOK_S))
            self._look_now.clear()
            due = told or time.monotonic() - asked >= self._interval_s
            if self._closing.is_set() or self._failure is not None or not (due or self._one_is_dead()):
                continue
            self._examine()
            asked = time.monotonic()

    def _one_is_dead(self) -> bool:
        """Whether a process is gone: seen at once, where one that hangs takes a question."""
        return not all(lives(member.server) for member in self._members if member.up)

    def _examine(self) -> None:
        """Find those that died or hang, withdraw them, and begin their repair."""
        with self._weights, self._changing:
            if self._closing.is_set() or self._failure is not None:
                return
            if self._router is not None and not lives(self._router):
                self._renew_router()
            up = [(i, member) for i, member in enumerate(self._members) if member.up]
            well = asyncio.run(healthy([member for _, member in up], timeout_s=self._timeout_s))
            lost = [found for found, fine in zip(up, well, strict=True) if not fine]
            for _, member in lost:
                member.up = member.routed = False
            if lost:
                self._tell()
            self._repairs = [thread for thread in self._repairs if thread.is_alive()]
            for i, member in lost:
                thread = threading.Thread(target=self._repaired, args=(i, member), daemon=True)
                self._repairs.append(thread)
                thread.start()

    def _repaired(self, i: int, member: Member) -> None:
        """Restart until it is up with current weights, or there are no restarts left."""
        while not self._closing.is_set():
            try:
                self._restarted(i, member)
                return
            except NoRestartLeft as error:
                self._give_up(error)
                return
            except Exception as error:
                if not self._closing.is_set():
                    say(f"engine {i}: {error}")

    def _restarted(self, i: int, member: Member) -> None:
        begun = time.monotonic()
        member.up = member.routed = False
        why = last_words(member.server)
        with self._changing:
            if self.restarts >= self._max_restarts:
                raise NoRestartLeft(
                    f"engine {i} at {member.url} died ({why}) and all {self._max_restarts} restarts are used "
                    f"(engine.max_restarts)"
                )
            self.restarts += 1
        say(f"engine {i} at {member.url} died ({why}); restart {self.restarts} of {self._max_restarts}")
        if self._router is not None:
            with contextlib.suppress(BackendError):
                self._router.remove(member.url)
        try:
            member.server.stop()
        except Exception:  # its host is gone: another one
            member.server = self._make(i)
        if self._closing.is_set():
            return
        member.url = member.server.start()
        with self._weights:
            if self.restore is not None:
                self.restore(member.url)
            with self._changing:
                member.up = True
                self._route()
                self._tell()
        say(f"engine {i} is back at {member.url} after {time.monotonic() - begun:.0f} s")

    def _renew_router(self) -> None:
        assert self._router is not None
        say(f"sglang-router died ({last_words(self._router)}); starting it again")
        try:
            self._router_url = self._router.start()
            for member in self._members:
                member.routed = False
            self._route()
        except BackendError as error:
            self._give_up(error)
        self._tell()

    def _route(self) -> None:
        """Put behind the router who is not: it takes nobody who still waits for weights."""
        for member in self._members:
            if self._router is not None and member.up and not member.routed and has_weights(member):
                self._router.add(member.url, **member.kind)
                member.routed = True

    def _give_up(self, error: BackendError) -> None:
        self._failure = error
        if self.failed is not None and not self._closing.is_set():
            self.failed(error)

    def _tell(self) -> None:
        if self.announce is not None and not self._closing.is_set():
            self.announce(self.addresses, self.urls)
