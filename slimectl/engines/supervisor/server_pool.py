"""A pool of servers, which may join and leave. It restarts servers that die or hang, and restores their weights."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as count_from
from queue import SimpleQueue
from typing import Any

from slimectl.engines.supervisor.health import (
    Member,
    RouterProcess,
    RunningServer,
    Server,
    failure_reason,
    healthy,
    is_alive,
    is_ready,
    stop_quietly,
)
from slimectl.errors import BackendError
from slimectl.system.event_loop import run_coroutine
from slimectl.system.stdio import logger, quantity

Announce = Callable[[Sequence[str], Sequence[str], Sequence[str], Mapping[str, int]], None]

LOOK_S = 1.0
"""Seconds between checks that processes are alive. /health is requested every `interval_s`."""

DRAIN_LOOK_S = 0.2
"""Seconds between checks whether the requests of a server that leaves have finished."""

LEAVE_S = 10.0
"""Seconds to wait for the pool's threads when it is closed."""


class RestartLimitReached(BackendError):
    """Raised if a server dies after all restarts have been used."""


Outcome = tuple[int, Any, BaseException | None]
"""Number of a server, and the result or exception of a call for it."""


def in_threads(
    call: Callable[[Any], Any], servers: Sequence[Any]
) -> tuple[list[threading.Thread], SimpleQueue[Outcome]]:
    """Call a function for each server in a separate thread. Return the threads and a queue of their outcomes.

    Futures are not used. If a signal raises an exception in `Condition.__enter__` (CPython 3.11), a future's lock is
    never released, and an executor waits for the blocked thread even at exit. SimpleQueue is implemented in C.
    """
    outcomes: SimpleQueue[Outcome] = SimpleQueue()

    def run(number: int, server: Any) -> None:
        try:
            outcomes.put((number, call(server), None))
        except BaseException as error:
            outcomes.put((number, None, error))

    threads = [threading.Thread(target=run, args=(i, server), daemon=True) for i, server in enumerate(servers)]
    for thread in threads:
        thread.start()
    return threads, outcomes


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """How a pool checks and restarts its servers."""

    watches: bool = True
    """Whether servers are checked at all, every `interval_s`."""

    interval_s: float = 30.0
    timeout_s: float = 30.0
    """Seconds in which a server must respond."""

    first_wait_s: float = 0.0
    max_restarts: int = 10


class ServerPool:
    """A pool of `count` servers from `make(i)`, behind an optional `router` (`kinds[i]`: registration options).

    Set its callbacks before `start`. `announce(addresses, workers, leaving, numbers)` is called whenever the request
    addresses change. Requests on servers that are leaving may finish there. A new or restarted server is included only
    after `restore(url)` has pushed the current weights to it. It returns their version. `failed` is called with the
    final error if a server dies after all restarts have been used. `in_flight(urls)` returns the number of requests at
    each server. `release(i)` frees the place of a server that has left.
    """

    announce: Announce | None = None
    restore: Callable[[str], str] | None = None
    failed: Callable[[BaseException], None] | None = None
    rank_beside: Callable[[int], int | None] | None = None
    """Returns the training rank that shares the GPU of server i, if any."""
    in_flight: Callable[[Sequence[str]], Mapping[str, int]] | None = None
    release: Callable[[int], None] | None = None

    def __init__(
        self,
        make: Callable[[int], Server],
        count: int,
        *,
        router: RouterProcess | None = None,
        kinds: Sequence[Mapping[str, Any]] | None = None,
        watch: WatchOptions = WatchOptions(),
    ) -> None:
        self.restarts = 0
        self.losses = 0
        """Number of servers that died, hung or could not be reached."""
        self._make, self._router, self._router_url = make, router, ""
        self.watch = watch
        self._kinds = kinds or [{}]
        self._numbers = count_from(0)
        self._members = [self._member(make(i)) for i in range(count)]
        self._failure: BaseException | None = None
        self._rests = False
        self._weights = threading.RLock()  # held while the trainer or a restart changes weights
        self._changing = threading.RLock()
        self._check_now, self._closing = threading.Event(), threading.Event()
        self._repairs: list[threading.Thread] = []
        self._joining: set[threading.Thread] = set()
        self._monitor: threading.Thread | None = None

    def _member(self, server: Server) -> Member:
        number = next(self._numbers)
        return Member(number, server, self._kinds[min(number, len(self._kinds) - 1)])

    @property
    def members(self) -> list[Member]:
        """The servers, in the order in which they joined."""
        return list(self._members)

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers that respond."""
        return [member.url for member in self._members if member.up]

    def rank_of(self, url: str) -> int | None:
        """Return the training rank that shares the GPU of the server at an address, or None."""
        number = next(member.number for member in self._members if member.url == url)
        return self.rank_beside(number) if self.rank_beside is not None else None

    @property
    def is_routed(self) -> bool:
        """Whether requests go to a router."""
        return self._router is not None

    @property
    def addresses(self) -> list[str]:
        """Addresses for requests: the router, else the servers. Empty while no server responds."""
        return [self._router_url] if self.is_routed and self.urls else self.urls

    def start(self) -> None:
        """Start all servers concurrently. Raises the first error, after stopping all of them."""
        parts = self._parts()
        threads, outcomes = in_threads(self._start_part, parts)
        urls: dict[int, str] = {}
        try:
            while len(urls) < len(parts):
                number, url, error = outcomes.get()
                if error is not None:
                    raise error
                urls[number] = str(url)
            for number, member in enumerate(self._members):
                member.url, member.state = urls[number], "ready"
            if self._router is not None:
                self._router_url = urls[len(self._members)]
                self._route()
        except BaseException:
            self.close()  # ends servers that are still starting
            raise
        finally:
            for thread in threads:
                thread.join()
        self.announce_change()
        if self.watch.watches:
            self._monitor = threading.Thread(target=self._monitor_loop, name="slimectl-servers", daemon=True)
            self._monitor.start()

    def look(self, _url: str = "") -> None:
        """Check the servers soon instead of after the interval, because a request has failed."""
        self._check_now.set()

    def settle(self) -> None:
        """Check the servers now, and return when all of them respond again. Raises BackendError if no restart is left.

        Do not call it within `pause_watch`, because restarts push weights.
        """
        self._check_servers()
        for thread in list(self._repairs):
            thread.join()
        self.check()

    def check(self) -> None:
        """Raise the final error, after which nothing is restarted, if there was one."""
        if self._failure is not None:
            raise self._failure

    def rest(self, rests: bool) -> None:
        """Suspend checks and restarts while the servers sleep. SGLang 0.5.21 then fails its health check."""
        with self._weights:
            self._rests = rests

    @contextlib.contextmanager
    def pause_watch(self) -> Iterator[None]:
        """Suspend checks and restarts while weights change, so that a server that loads does not count as hung."""
        with self._weights:
            yield
            with self._changing:
                self._route()

    def note_push(self, version: str) -> None:
        """Record that all servers that respond have these weights. Call it within `pause_watch`."""
        for member in self._members:
            member.weight_version = version if member.up else member.weight_version

    def add(self, url: str | None = None) -> Member:
        """Add a server, a new one or the running one at `url`. Returns it once it is ready and has current weights.

        Raises BackendError if it cannot start or get the weights. Nothing is left of it then.
        """
        self._joining.add(threading.current_thread())
        with self._changing:
            member = self._member(RunningServer(url) if url else RunningServer(""))
            self._members.append(member)
        try:
            if not url:
                member.server = self._make(member.number)
            member.url = self._start_part(member.server)
            self._admit(member)
        except BaseException:
            self._dismiss(member)
            raise
        finally:
            self._joining.discard(threading.current_thread())
        logger.info(f"engine {member.number} joined at {member.url} with weights {member.weight_version}")
        return member

    def remove(self, number: int, *, drain_s: float) -> int:
        """Remove a server. Its requests get `drain_s` seconds to finish, and the others move to other servers.

        Returns the number of requests that moved. Raises BackendError if no other server is ready.
        """
        with self._weights, self._changing:  # not during a push, which a missing server would break
            member = next((member for member in self._members if member.number == number), None)
            if member is None or member.leaves:
                raise BackendError(f"engine {number}: is not in the run, or leaves already")
            if not any(server.up for server in self._members if server is not member):
                raise BackendError(f"engine {number}: no other engine is ready, and a run needs one. Add one first.")
            drain_s = drain_s if member.up else 0.0
            member.state = "leaving"
            if self._router is not None and member.routed:
                with contextlib.suppress(BackendError):
                    self._router.remove(member.url)
            self.announce_change()
        deadline = time.monotonic() + drain_s
        while (running := self.running().get(member.url, 0)) and time.monotonic() < deadline:
            if self._closing.wait(DRAIN_LOOK_S):
                break
        self._dismiss(member)
        moved = f", {quantity(running, 'request')} moved to other engines" if running else ""
        logger.info(f"engine {number} at {member.url} left{moved}")
        return running

    def running(self) -> Mapping[str, int]:
        """Return the number of requests in flight at each server that has any."""
        urls = [member.url for member in self._members if member.up or member.leaves]
        return {} if self.in_flight is None else self.in_flight(urls)

    def _dismiss(self, member: Member) -> None:
        """Take a server out of the pool and stop it, unless it was started elsewhere. Its requests are moved."""
        with self._changing:
            if member in self._members:
                self._members.remove(member)
                self.announce_change()
        stop_quietly(member.server)
        if self.release is not None:
            self.release(member.number)

    def close(self) -> None:
        """Stop the servers and the monitoring."""
        self._closing.set()
        self._check_now.set()
        self._stop_all()
        for thread in [*self._repairs, *self._joining, *([self._monitor] if self._monitor is not None else [])]:
            thread.join(LEAVE_S)
        self._stop_all()  # servers that were just being started
        for member in self._members:
            member.state = "stopped"

    def _stop_all(self) -> None:
        for thread in in_threads(stop_quietly, self._parts())[0]:
            thread.join()

    def _parts(self) -> list[Server]:
        servers: list[Server] = [member.server for member in self._members]
        return [*servers, *([self._router] if self._router is not None else [])]

    def _start_part(self, part: Server) -> str:
        if self._closing.is_set():
            raise BackendError("the server pool is closing")
        return part.start()

    def _monitor_loop(self) -> None:
        self._closing.wait(self.watch.first_wait_s)
        last_check = time.monotonic()
        while not self._closing.is_set():
            requested = self._check_now.wait(min(self.watch.interval_s, LOOK_S))
            self._check_now.clear()
            due = requested or time.monotonic() - last_check >= self.watch.interval_s
            if self._closing.is_set() or self._failure is not None or not (due or self._any_process_died()):
                continue
            self._check_servers()
            last_check = time.monotonic()

    def _any_process_died(self) -> bool:
        """Whether a process has died. Unlike for a hung process, this needs no request."""
        return not all(is_alive(member.server) for member in self._members if member.up)

    def _check_servers(self) -> None:
        """Find servers that died or hang, withdraw them and restart them."""
        with self._weights, self._changing:
            if self._closing.is_set() or self._failure is not None or self._rests:
                return
            if self._router is not None and not is_alive(self._router):
                self._restart_router()
            up = [member for member in self._members if member.up]
            health = run_coroutine(healthy(up, timeout_s=self.watch.timeout_s))
            lost = [member for member, is_healthy in zip(up, health, strict=True) if not is_healthy]
            # The last server that was started elsewhere stays, and its requests are retried.
            gone = [member for member in lost if not member.is_ours] if len(lost) < len(up) else []
            lost = [member for member in lost if member.is_ours]
            self.losses += len(lost) + len(gone)
            for member in gone:
                self._members.remove(member)
                logger.warning(
                    f"engine {member.number} at {member.url} does not answer and leaves the run. When it is back, add "
                    f"it with: slimectl engines add RUN --url {member.url}"
                )
            for member in lost:
                member.state, member.routed = "restarting", False
            if lost or gone:
                self.announce_change()
            self._repairs = [thread for thread in self._repairs if thread.is_alive()]
            for member in lost:
                thread = threading.Thread(target=self._repair, args=(member,), daemon=True)
                self._repairs.append(thread)
                thread.start()

    def _repair(self, member: Member) -> None:
        """Restart a server until it is up with current weights, it is removed, or no restarts are left."""
        while not (self._closing.is_set() or member.leaves):
            try:
                self._restart(member)
                return
            except RestartLimitReached as error:
                self._give_up(error)
                return
            except Exception as error:
                if not (self._closing.is_set() or member.leaves):
                    logger.error(f"engine {member.number}: {error}")
        stop_quietly(member.server)

    def _restart(self, member: Member) -> None:
        started_at, limit, i = time.monotonic(), self.watch.max_restarts, member.number
        self._set_state(member, "restarting")
        reason = failure_reason(member.server)
        with self._changing:
            if self.restarts >= limit:
                raise RestartLimitReached(
                    f"engine {i} at {member.url} died ({reason}), and all {limit} restarts have been used "
                    f"(engine.max_restarts)"
                )
            self.restarts += 1
        logger.warning(f"engine {i} at {member.url} died ({reason}). Restart {self.restarts} of {limit}")
        if self._router is not None:
            with contextlib.suppress(BackendError):
                self._router.remove(member.url)
        try:
            member.server.stop()
        except Exception:  # its host is gone
            member.server = self._make(i)
        if self._closing.is_set() or member.leaves:
            return
        member.url = member.server.start()
        self._admit(member)
        logger.info(f"engine {i} is back at {member.url} after {time.monotonic() - started_at:.0f} s")

    def _admit(self, member: Member) -> None:
        """Push the current weights to a server that has started, and announce it."""
        with self._weights:
            self._set_state(member, "loading weights")
            if self.restore is not None:
                member.weight_version = self.restore(member.url)
            with self._changing:
                self._set_state(member, "ready")
                self._route()
                self.announce_change()

    def _set_state(self, member: Member, state: str) -> None:
        """Set the state of a server. Raises BackendError if it has been removed."""
        with self._changing:
            if member.leaves:
                raise BackendError(f"engine {member.number} was removed")
            member.state = state

    def _restart_router(self) -> None:
        assert self._router is not None
        logger.warning(f"the router died ({failure_reason(self._router)}). Restarting it.")
        try:
            self._router_url = self._router.start()
            for member in self._members:
                member.routed = False
            self._route()
        except BackendError as error:
            self._give_up(error)
        self.announce_change()

    def _route(self) -> None:
        """Register new servers with the router. It does not accept a server that still waits for weights."""
        for member in self._members:
            if self._router is not None and member.up and not member.routed and is_ready(member):
                self._router.add(member.url, **member.kind)
                member.routed = True

    def _give_up(self, error: BackendError) -> None:
        self._failure = error
        if self.failed is not None and not self._closing.is_set():
            self.failed(error)

    def announce_change(self) -> None:
        if self.announce is not None and not self._closing.is_set():
            leaving = [member.url for member in self._members if member.leaves]
            self.announce(self.addresses, self.urls, leaving, {member.url: member.number for member in self._members})
