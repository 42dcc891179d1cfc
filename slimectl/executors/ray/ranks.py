"""Ranks in actors: Ray places and watches them, requests and answers go over a socket to each."""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ray import cloudpickle

from slimectl.errors import BackendError, DiedError
from slimectl.executors.driving import GRACE_S, PipedRanks
from slimectl.executors.outputs import log_files
from slimectl.executors.rank import LOCALHOST, RankPipe, Seat, Serve, host_store, live
from slimectl.executors.ray.deaths import cause, is_alive, kill, tail_at
from slimectl.executors.ray.library import ray
from slimectl.executors.ray.surroundings import Surroundings, Whereabouts

START_S = 300.0
"""How long actors may take to start and to call back."""
TOKEN_BYTES = 32
HELLO_S = 5.0


class RankActor:
    """One rank: `live` does not return before the driving end closes the pipe."""

    def enter(self, surroundings: Surroundings, log: Path | None) -> Whereabouts:
        surroundings.enter(log)
        return Whereabouts.here()

    def live(self, served: bytes, seat: Seat, driver: tuple[str, int], token: bytes) -> None:
        joined = socket.create_connection(driver, timeout=START_S)
        joined.settimeout(None)
        joined.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        joined.sendall(token + struct.pack("!I", seat.rank))
        # Unpickled in there: what cannot be imported here is told like any other failure to build.
        live(_serve_pickled, lambda: served, RankPipe(Connection(joined.detach()), seat.rank), seat)


def _serve_pickled(served: Callable[[], bytes], pipe: RankPipe) -> None:
    serve, build = cloudpickle.loads(served())
    serve(build, pipe)


class RayRanks(PipedRanks):
    """N actors that each built `build()` and obey; `places` are the options that put rank i where it belongs."""

    def __init__(
        self, serve: Serve, build: Callable[[], Any], *, places: Sequence[dict[str, Any]], surroundings: Surroundings,
        logs: Path | None, living: int,
    ) -> None:  # fmt: skip
        super().__init__(len(places), log_files(logs, len(places), living))
        self._actors: list[Any] = []
        self._lives: list[Any] = []
        self._where: list[Whereabouts] = []
        try:
            self._start(cloudpickle.dumps((serve, build)), places, surroundings)
        except BaseException:
            self.end(polite=False)
            raise

    def _start(self, served: bytes, places: Sequence[dict[str, Any]], surroundings: Surroundings) -> None:
        made = ray.remote(RankActor)
        logs = self._logs or [None] * self.ranks
        self._actors = [made.options(num_cpus=0, max_restarts=0, **place).remote() for place in places]
        entering = [actor.enter.remote(surroundings, log) for actor, log in zip(self._actors, logs, strict=True)]
        self._where = started(entering, f"{self.ranks} rank actors")
        here = ray.util.get_node_ip_address()
        alone = all(place.address == here for place in self._where)
        host = LOCALHOST if alone else here
        # The driver holds the store, so that its port is taken before any rank asks for it.
        self._store = host_store(host)
        token = secrets.token_bytes(TOKEN_BYTES)
        with socket.create_server((host, 0), backlog=self.ranks) as server:
            driver = host, server.getsockname()[1]
            for actor, seat in zip(self._actors, self._seats(host), strict=True):
                self._lives.append(actor.live.remote(served, seat, driver, token))
            self._pipes = self._accepted(server, token)

    def _seats(self, host: str) -> Iterator[Seat]:
        machines = Counter(place.node for place in self._where)
        before: Counter[str] = Counter()
        for rank, place in enumerate(self._where):
            local = before[place.node]
            before[place.node] += 1
            # Ray shows an actor its own GPU alone.
            yield Seat(
                rank, self.ranks, host, self._store.port, local=local, neighbours=machines[place.node], device=0,
                address=place.address,
            )  # fmt: skip

    def _accepted(self, server: socket.socket, token: bytes) -> list[Connection]:
        """The pipe of every rank, once it has called. Raises DiedError if one cannot any more."""
        pipes: dict[int, Connection] = {}
        deadline = time.monotonic() + START_S
        while len(pipes) < self.ranks:
            if select.select([server], [], [], 0.2)[0]:
                caller, _ = server.accept()
                caller.settimeout(HELLO_S)
                said = _received(caller, len(token) + 4)
                if hmac.compare_digest(said[: len(token)], token):
                    caller.settimeout(None)
                    caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    pipes[struct.unpack("!I", said[len(token) :])[0]] = Connection(caller.detach())
                continue
            for rank in self._gone():
                raise self._told(self._death(rank), rank)
            if time.monotonic() > deadline:
                silent = sorted(set(range(self.ranks)) - set(pipes))
                raise BackendError(f"ranks {silent} did not call back within {START_S:g} s; can they reach this host?")
        return [pipes[rank] for rank in range(self.ranks)]

    def _gone(self) -> Iterator[int]:
        ended, _ = ray.wait(self._lives, num_returns=len(self._lives), timeout=0)
        lost = {node for node in {place.node for place in self._where} if not is_alive(node)}
        for rank, (life, place) in enumerate(zip(self._lives, self._where, strict=True)):
            if life in ended or place.node in lost:
                yield rank

    def _death(self, rank: int) -> DiedError:
        where, error = self._where[rank], None
        if is_alive(where.node):
            try:
                ray.get(self._lives[rank], timeout=GRACE_S)
            except Exception as raised:
                error = raised
        why = cause(error, where)
        see = f"see {self._logs[rank]}" if self._logs else "see its messages above"
        return DiedError(f"rank {rank} of {self.ranks} died (on {where}: {why}); {see}")

    def _tail(self, rank: int) -> str:
        return tail_at(self._logs[rank], self._where[rank]) if self._logs else ""

    def _reap(self, deadline: float) -> None:
        if self._lives:
            ray.wait(self._lives, num_returns=len(self._lives), timeout=max(0.0, deadline - time.monotonic()))
        kill(self._actors, self._where)


def started(entering: list[Any], what: str) -> list[Whereabouts]:
    """Where actors found themselves. Raises BackendError if they do not start."""
    try:
        return list(ray.get(entering, timeout=START_S))
    except ray.exceptions.GetTimeoutError:
        raise BackendError(f"{what} did not start within {START_S:g} s; see `ray status`") from None
    except ray.exceptions.RayError as error:
        first = next(line for line in reversed(str(error).splitlines()) if line.strip())
        raise BackendError(f"{what} did not start: {first.strip()}; is slimectl installed there?") from error


def _received(caller: socket.socket, count: int) -> bytes:
    """Up to `count` bytes; fewer if the caller falls silent."""
    said = b""
    try:
        while len(said) < count and (more := caller.recv(count - len(said))):
            said += more
    except OSError:
        pass
    return said.ljust(count, b"\0")
