"""Executor on a Ray cluster (protocols.Executor)."""

from __future__ import annotations

import contextlib
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ray import cloudpickle

from slimectl.errors import BackendError
from slimectl.executors.local import map_here
from slimectl.executors.rank_group import GRACE_S
from slimectl.executors.ray.actors import THREADS, Host, ObjectActor, Proxy, hosted_call
from slimectl.executors.ray.cluster import DriverEnvironment, connect, disconnect, machine_addresses, ray
from slimectl.executors.ray.failures import kill, processes_at, wait_for_news
from slimectl.executors.ray.placement_group import WAIT_S, ExtraPlace, PlacedBundles
from slimectl.executors.ray.pool import Pool
from slimectl.executors.ray.rank_group import RayRanks, started
from slimectl.executors.time_limits import Limited, wall_limit
from slimectl.planner.placement import PartTable, Placement
from slimectl.protocols import Serve
from slimectl.system.loopback import bypass_proxies
from slimectl.system.processes import ProcessView

Item = TypeVar("Item")
Result = TypeVar("Result")


class RayExecutor:
    """Runs everything in actors on the cluster at `address`, or on one that is started here and ends with `close`.

    `placement` stays reserved until `close`. Without one, ranks and hosts run on CPUs, wherever there is room. Output
    of ranks and hosts goes to rank-0.log, NAME.log, … in `logs` (on the machine where they run), or to the driver's
    stderr without it. Raises BackendError if the cluster does not answer or is too small.
    """

    def __init__(
        self, address: str | None = None, *, placement: Placement | None = None, logs: Path | None = None,
        wait_s: float = WAIT_S,
    ) -> None:  # fmt: skip
        self._logs = None if logs is None else logs.absolute()
        self._groups: list[RayRanks] = []
        self._hosts: dict[str, Host] = {}
        self._extra_places: dict[str, ExtraPlace] = {}
        self._wait_s = wait_s
        self._connected = not ray.is_initialized()
        self._session = connect(address, cpus=len(placement.bundles) + 1 if placement else 1)
        bypass_proxies(*machine_addresses())
        self._environment = DriverEnvironment.here()
        self._pool = Pool(self._environment)
        self.places: PlacedBundles | None = None
        try:
            self.places = PlacedBundles(placement, wait_s=wait_s) if placement else None
            self._parts = PartTable(placement) if placement else None
        except BaseException:
            self.close()
            raise

    def group(self, serve: Serve, build: Callable[[], Any], *, ranks: int) -> RayRanks:
        """Start N actors that join one torch.distributed group, then run `serve(build, pipe)`."""
        self._groups = [group for group in self._groups if not group.ended]
        places: list[dict[str, Any]] = [{} for _ in range(ranks)]
        if self.places is not None:
            if ranks > self.places.placement.ranks:
                raise BackendError(f"{ranks} ranks were requested, but the placement has {self.places.placement.ranks}")
            self.places.settle()
            places = [self.places.of_rank(rank) for rank in range(ranks)]
        rank_group = RayRanks(
            serve, build, places=places, environment=self._environment, logs=self._logs, living=len(self._groups)
        )
        self._groups.append(rank_group)
        return rank_group

    def host(self, build: Callable[[], Any], *, name: str, gpus: float = 0.0) -> Any:
        """Build an object in an actor and return its proxy. With `gpus`, use the next free engine with that many GPUs.

        An engine over several machines has a part on each, which counts as an engine here. If all are in use, the GPUs
        are taken from the rest of the cluster. Raises BackendError if they are not free there.

        An existing host of the same name is ended first, and its GPUs are reused.
        """
        if name in self._hosts:
            self._end_host(name)
        place, variables = self._gpu_place(name, gpus) if gpus else ({}, {})
        environment = replace(self._environment, variables={**self._environment.variables, **variables})
        self._hosts[name] = host = self._start_host(build, name, environment, place)
        return Proxy(host)

    def _gpu_place(self, name: str, gpus: float) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the Ray options of a host with GPUs, and the environment variables that show it all of them."""
        if self.places is None or self._parts is None:
            raise BackendError("a host with GPUs needs a placement that has engines")
        part = self._parts.assign(name, gpus)
        if part is None:
            if name not in self._extra_places:
                self._extra_places[name] = ExtraPlace(name, gpus, wait_s=self._wait_s)
            return self._extra_places[name].options, {}
        self.places.settle()
        # Ray shows an actor only the GPU of its bundle. The GPUs of the engine's other bundles are ours too.
        shown = ",".join(self.places.gpus_of_part(part))
        return self.places.of_part(part), {"CUDA_VISIBLE_DEVICES": shown} if gpus > 1 else {}

    def rank_beside(self, name: str) -> int | None:
        return self._parts.rank_beside(name) if self._parts is not None else None

    def end_host(self, name: str) -> None:
        if name in self._hosts:
            self._end_host(name)
        if self._parts is not None:
            self._parts.release(name)
        if (place := self._extra_places.pop(name, None)) is not None:
            place.release()

    def stream(self, make: Callable[[], Iterator[Item]], *, ahead: int) -> Iterator[Item]:
        """Stream the items of `make()`.

        A hosted object's method, or a partial of it, runs in the object's actor. Anything else runs in a new actor.
        """
        key = uuid.uuid4().hex
        if (call := hosted_call(make)) is not None:
            method, arguments, options = call
            yield from method.host.stream(method.name, arguments, options, ahead=ahead, key=key)
            return
        host = self._start_host(partial(_identity, make), f"stream-{key[:6]}", self._environment, {})
        self._hosts[key] = host
        try:
            yield from host.stream("__call__", (), {}, ahead=ahead, key=key)
        finally:
            if self._hosts.pop(key, None):
                kill([host.actor], [host.location])

    def map(
        self,
        fn: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        workers: int,
        timeout_s: float | None = None,
        wall_timeout_s: float | None = None,
        prepare: Callable[[Item], Any] | None = None,
    ) -> Iterator[Result | BaseException]:
        """Yield results in order. With `workers` 0, call `fn` in this process, lazily, one item at a time.

        A worker that overruns a limit (see protocols.Executor) is killed and replaced. At most 4 items per worker are
        in flight.
        """
        if workers == 0:
            return map_here(fn, items)
        limited = Limited(fn, prepare, timeout_s, wall_limit(timeout_s, wall_timeout_s))
        return self._pool.map(limited, items, workers=workers)

    def list_processes(self, *, stacks: bool) -> list[ProcessView]:
        """Implement protocols.ProcessLister: look at every actor and what it started, on its machine."""
        places = [host.location for host in list(self._hosts.values())] + self._pool.locations()
        places += [place for group in self._groups for place in group.locations]
        pids: dict[tuple[str, str], list[int]] = defaultdict(list)
        for place in places:
            pids[place.node, place.address].append(place.pid)
        return [view for machine in pids for view in processes_at(*machine, pids[machine], stacks=stacks)]

    def close(self) -> None:
        """Close the hosted objects, end every actor, and leave the cluster, or stop it if it was started here."""
        with contextlib.ExitStack() as closing:
            if self._connected:
                closing.callback(disconnect, self._session)
            if not ray.is_initialized():
                return
            if self.places is not None:
                closing.callback(self.places.release)
            for place in self._extra_places.values():
                closing.callback(place.release)
            closing.callback(self._pool.close)
            for group in self._groups:
                closing.callback(group.end)
            for name in list(self._hosts):
                closing.callback(self._end_host, name)

    def _start_host(
        self, build: Callable[[], Any], name: str, environment: DriverEnvironment, place: dict[str, Any]
    ) -> Host:
        wait_for_news(WAIT_S)
        options: dict[str, Any] = {"concurrency_groups": {"control": 2}, "max_concurrency": THREADS}
        actor_class: Any = ray.remote(**options)(ObjectActor)
        actor = actor_class.options(num_cpus=0, max_restarts=0, **place).remote(name)
        log = None if self._logs is None else self._logs / f"{name}.log"
        [location] = [None]
        try:
            [location] = started([actor.enter.remote(environment, log)], name)
            host = Host(actor, name, location, log)
            host.answered(actor.build.remote(cloudpickle.dumps(build)))
        except BaseException:
            kill([actor], [location] if location else [])
            raise
        return host

    def _end_host(self, name: str) -> None:
        host = self._hosts.pop(name)
        try:
            host.answered(host.actor.close.remote(), timeout=GRACE_S)
        except Exception:
            pass  # it has ended, or is killed below
        finally:
            kill([host.actor], [host.location])


def _identity(make: Callable[[], Any]) -> Callable[[], Any]:
    return make
