"""Worker pool of actors. Each works on one item at a time, and results come in order."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from slimectl.errors import BackendError
from slimectl.executors.local import in_order
from slimectl.executors.rank_process import picklable_error
from slimectl.executors.ray.cluster import ActorLocation, DriverEnvironment, ray
from slimectl.executors.ray.failures import death_reason, kill
from slimectl.executors.ray.rank_group import started
from slimectl.executors.time_limits import CPU_SIGNAL, WALL_SIGNAL, WARM_UP_S, Limited, overrun
from slimectl.system.liveness import expose


class PoolActor:
    """Worker actor that calls one function."""

    def __init__(self) -> None:
        self._fn: Any = None

    def enter(self, environment: DriverEnvironment) -> ActorLocation:
        environment.enter(None)
        expose("worker")
        return ActorLocation.here()

    def take(self, fn: bytes) -> None:
        self._fn = cloudpickle.loads(fn)

    def work(self, item: Any) -> Any:
        try:
            return self._fn(item)
        except Exception as error:
            return picklable_error(error, "a worker")


@dataclass(eq=False)
class Worker:
    actor: Any
    location: ActorLocation


class Pool:
    """Workers that are reused from one `map` to the next. Several maps may run at once, each with its own workers."""

    def __init__(self, environment: DriverEnvironment) -> None:
        self._environment = environment
        self._idle: list[Worker] = []
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._lock = threading.Lock()

    def map(self, fn: Limited, items: Iterable[Any], *, workers: int) -> Iterator[Any]:
        """Yield results in order (protocols.Executor.map, for one worker or more)."""
        lease = Lease(self, fn, workers)
        try:
            yield from in_order(lease.submit, items, workers=workers)
        finally:
            lease.close()

    def taken(self, count: int, fn: bytes) -> list[Worker]:
        """Return `count` workers that have loaded `fn`, idle ones first. Raises what unpickling `fn` raised there."""
        with self._lock:
            idle, self._idle = self._idle[:count], self._idle[count:]
        acquired: list[Worker] = []
        actors: list[Any] = []
        try:
            for worker, loading in [(worker, worker.actor.take.remote(fn)) for worker in idle]:
                with contextlib.suppress(ray.exceptions.RayActorError):  # it died while it was idle
                    ray.get(loading)
                    acquired.append(worker)
            actor_class: Any = ray.remote(PoolActor)
            # Workers request no CPU: ranks and engines reserve the CPUs, and grading runs at the same time.
            options = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
            actors = [actor_class.options(**options).remote() for _ in range(count - len(acquired))]
            locations = started([actor.enter.remote(self._environment) for actor in actors], f"{len(actors)} workers")
            ray.get([actor.take.remote(fn) for actor in actors])
            acquired += [Worker(actor, place) for actor, place in zip(actors, locations, strict=True)]
            self._workers.update(acquired)
        except ray.exceptions.RayTaskError as error:
            kill(actors, [])
            raise error.cause from error
        except BaseException:
            kill(actors, [])
            raise
        return acquired

    def give_back(self, workers: Iterable[Worker]) -> None:
        with self._lock:
            self._idle += workers

    def locations(self) -> list[ActorLocation]:
        """Return where the workers run."""
        return [worker.location for worker in self._workers]

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        kill_workers(idle)


class Lease:
    """The workers of one `map` call. A thread waits for each of them."""

    def __init__(self, pool: Pool, limited: Limited, workers: int) -> None:
        self._pool, self._limited, self._fn = pool, limited, cloudpickle.dumps(limited)
        self._free = pool.taken(workers, self._fn)
        self._busy: set[Worker] = set()
        self._closed, self._lock = False, threading.Lock()
        self._threads = ThreadPoolExecutor(workers, "slimectl-pool")

    def submit(self, item: Any) -> Future[Any]:
        """Call the function on an item in a free worker. An error is the result."""
        return self._threads.submit(self._work, item)

    def close(self) -> None:
        """Return idle workers to the pool, and end the ones that are working on an item."""
        with self._lock:
            self._closed = True
            ended, self._busy = self._busy, set()
        kill_workers(list(ended))
        self._threads.shutdown(cancel_futures=True)
        self._pool.give_back(self._free)

    def _work(self, item: Any) -> Any:
        with self._lock:
            if self._closed:
                return None
            worker, started_s = self._free.pop(), time.monotonic()
            self._busy.add(worker)
        # A worker ends itself at its limits. This one is for a worker that is stuck while it prepares, or cannot end.
        wall_s = self._limited.wall_s
        try:
            result = ray.get(worker.actor.work.remote(item), timeout=None if wall_s is None else wall_s + WARM_UP_S)
        except ray.exceptions.GetTimeoutError:
            return self._replace(worker, TimeoutError(f"took longer than {wall_s:g} s"))
        except ray.exceptions.RayTaskError as error:
            result = error.cause
        except ray.exceptions.RayError as error:
            late = self._overrun(time.monotonic() - started_s)
            return self._replace(
                worker, late or BackendError(f"the worker died on it ({death_reason(error, worker.location)})")
            )
        if self._is_ours(worker):
            self._free.append(worker)
        return result

    def _is_ours(self, worker: Worker) -> bool:
        """Take a worker from the busy ones. False if `close` is ending it."""
        with self._lock:
            is_busy = worker in self._busy
            self._busy.discard(worker)
            return is_busy

    def _overrun(self, elapsed_s: float) -> TimeoutError | None:
        """Return the error of an item whose worker probably ended at a limit. Ray does not report the signal.

        All threads of the worker use its CPU time, including Ray's, so half of the wall time may have passed.
        """
        cpu_s, wall_s = self._limited.cpu_s, self._limited.wall_s
        if wall_s is not None and elapsed_s >= wall_s:
            return overrun(WALL_SIGNAL, cpu_s, wall_s)
        return overrun(CPU_SIGNAL, cpu_s, wall_s) if cpu_s is not None and elapsed_s >= cpu_s / 2 else None

    def _replace(self, worker: Worker, result: BaseException) -> BaseException:
        """Replace a worker that failed on an item, and return the item's result."""
        if self._is_ours(worker):
            kill_workers([worker])
            self._free += self._pool.taken(1, self._fn)
        return result


def kill_workers(workers: Sequence[Worker]) -> None:
    kill([worker.actor for worker in workers], [worker.location for worker in workers])
