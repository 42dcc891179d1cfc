"""Rank group of Ray actors. Ray places and watches them. Requests and answers use one socket per rank."""

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

from slimectl.errors import BackendError
from slimectl.executors.child_processes import log_files
from slimectl.executors.rank_group import GRACE_S, RankGroupBase
from slimectl.executors.rank_process import LOCALHOST, ConnectionPipe, RankInfo, host_store, run_rank
from slimectl.executors.ray.cluster import ActorLocation, DriverEnvironment, ray
from slimectl.executors.ray.failures import death_reason, is_alive, kill, tail_at
from slimectl.protocols import RankPipe, Serve

START_S = 300.0
"""Seconds that actors may take to start and to connect to the driver."""
TOKEN_BYTES = 32
HELLO_S = 5.0


class RankActor:
    """Actor of one rank: `live` returns when the driver closes the pipe."""

    def enter(self, environment: DriverEnvironment, log: Path | None) -> ActorLocation:
        environment.enter(log)
        return ActorLocation.here()

    def live(self, pickled: bytes, seat: RankInfo, driver: tuple[str, int], token: bytes) -> None:
        connection = socket.create_connection(driver, timeout=START_S)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.sendall(token + struct.pack("!I", seat.rank))
        # Unpickled inside, so that a failed import is reported like any other failure to build.
        run_rank(_serve_pickled, lambda: pickled, ConnectionPipe(Connection(connection.detach()), seat.rank), seat)


def _serve_pickled(get_pickled: Callable[[], bytes], pipe: RankPipe) -> None:
    serve, build = cloudpickle.loads(get_pickled())
    serve(build, pipe)


class RayRanks(RankGroupBase):
    """N actors that each call `build()` and serve requests. `places[i]` has the Ray options of rank i."""

    def __init__(
        self, serve: Serve, build: Callable[[], Any], *, places: Sequence[dict[str, Any]],
        environment: DriverEnvironment, logs: Path | None, living: int,
    ) -> None:  # fmt: skip
        super().__init__(len(places), log_files(logs, len(places), living))
        self._actors: list[Any] = []
        self._lives: list[Any] = []
        self.locations: list[ActorLocation] = []
        try:
            self._start(cloudpickle.dumps((serve, build)), places, environment)
        except BaseException:
            self.end(polite=False)
            raise

    def _start(self, pickled: bytes, places: Sequence[dict[str, Any]], environment: DriverEnvironment) -> None:
        actor_class = ray.remote(RankActor)
        logs: Sequence[Path | None] = self._logs or [None] * self.ranks
        self._actors = [actor_class.options(num_cpus=0, max_restarts=0, **place).remote() for place in places]
        references = [actor.enter.remote(environment, log) for actor, log in zip(self._actors, logs, strict=True)]
        self.locations = started(references, f"{self.ranks} rank actors")
        driver_address = ray.util.get_node_ip_address()
        alone = all(place.address == driver_address for place in self.locations)
        host = LOCALHOST if alone else driver_address
        # The driver hosts the store, so that its port is bound before any rank connects.
        self._store = host_store(host)
        token = secrets.token_bytes(TOKEN_BYTES)
        with socket.create_server((host, 0), backlog=self.ranks) as server:
            driver = host, server.getsockname()[1]
            for actor, seat in zip(self._actors, self._seats(host), strict=True):
                self._lives.append(actor.live.remote(pickled, seat, driver, token))
            self._pipes = self._accept_ranks(server, token)

    def _seats(self, host: str) -> Iterator[RankInfo]:
        machines = Counter(place.node for place in self.locations)
        local_ranks: Counter[str] = Counter()
        for rank, place in enumerate(self.locations):
            local = local_ranks[place.node]
            local_ranks[place.node] += 1
            # Ray shows an actor only its own GPU.
            yield RankInfo(
                rank, self.ranks, host, self._store.port, local=local, neighbours=machines[place.node], device=0,
                address=place.address,
            )  # fmt: skip

    def _accept_ranks(self, server: socket.socket, token: bytes) -> list[Connection]:
        """Wait until every rank has connected, and return their pipes. Raises DiedError if a rank died before that."""
        pipes: dict[int, Connection] = {}
        deadline = time.monotonic() + START_S
        while len(pipes) < self.ranks:
            if select.select([server], [], [], 0.2)[0]:
                caller, _ = server.accept()
                caller.settimeout(HELLO_S)
                hello = _receive_exactly(caller, len(token) + 4)
                if hmac.compare_digest(hello[: len(token)], token):
                    caller.settimeout(None)
                    caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    pipes[struct.unpack("!I", hello[len(token) :])[0]] = Connection(caller.detach())
                continue
            for rank in self._ended_ranks():
                raise self._death_error(rank)
            if time.monotonic() > deadline:
                silent = sorted(set(range(self.ranks)) - set(pipes))
                raise BackendError(f"ranks {silent} did not connect within {START_S:g} s. Can they reach this host?")
        return [pipes[rank] for rank in range(self.ranks)]

    def _ended_ranks(self) -> Iterator[int]:
        ended, _ = ray.wait(self._lives, num_returns=len(self._lives), timeout=0)
        lost = {node for node in {place.node for place in self.locations} if not is_alive(node)}
        for rank, (life, place) in enumerate(zip(self._lives, self.locations, strict=True)):
            if life in ended or place.node in lost:
                yield rank

    def _ending(self, rank: int) -> str:
        location, error = self.locations[rank], None
        if is_alive(location.node):
            try:
                ray.get(self._lives[rank], timeout=GRACE_S)
            except Exception as raised:
                error = raised
        return f"on {location}: {death_reason(error, location)}"

    def _tail(self, rank: int) -> str:
        return tail_at(self._logs[rank], self.locations[rank]) if self._logs else ""

    def _reap(self, deadline: float) -> None:
        if self._lives:
            ray.wait(self._lives, num_returns=len(self._lives), timeout=max(0.0, deadline - time.monotonic()))
        kill(self._actors, self.locations)


def started(references: list[Any], description: str) -> list[ActorLocation]:
    """Wait until actors have started, and return their locations. Raises BackendError if they do not start."""
    try:
        return list(ray.get(references, timeout=START_S))
    except ray.exceptions.GetTimeoutError:
        raise BackendError(f"{description} did not start within {START_S:g} s. See `ray status`.") from None
    except ray.exceptions.RayError as error:
        first = next(line for line in reversed(str(error).splitlines()) if line.strip())
        raise BackendError(f"{description} did not start: {first.strip()}. Is slimectl installed there?") from error


def _receive_exactly(caller: socket.socket, count: int) -> bytes:
    """Read `count` bytes, padded with zeros if the peer sends fewer."""
    received = b""
    try:
        while len(received) < count and (chunk := caller.recv(count - len(received))):
            received += chunk
    except OSError:
        pass
    return received.ljust(count, b"\0")
