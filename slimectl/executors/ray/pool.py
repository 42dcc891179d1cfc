"""Worker pool of actors. Each works on one item at a time, and results come in order."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from slimectl.errors import BackendError
from slimectl.executors.rank_process import picklable_error
from slimectl.executors.ray.cluster import ActorLocation, DriverEnvironment, ray
from slimectl.executors.ray.failures import death_reason, kill
from slimectl.executors.ray.rank_group import started
from slimectl.executors.time_limits import CPU_SIGNAL, WALL_SIGNAL, WARM_UP_S, Limited, overrun
from slimectl.system.liveness import expose

IN_HAND = 4
"""Items per worker that are read from the input before their results are consumed."""


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


@dataclass(eq=False)
class RayTask:
    """Item in flight, and its result once it is done."""

    item: Any
    result: Any = None
    done: bool = False
    worker: Worker | None = None
    started: float = 0.0
    tried_again: bool = False


class Pool:
    """Workers that are reused from one `map` to the next. Several maps may run at once, each with its own workers."""

    def __init__(self, environment: DriverEnvironment) -> None:
        self._environment = environment
        self._idle: list[Worker] = []
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._lock = threading.Lock()

    def map(self, fn: Limited, items: Iterable[Any], *, workers: int) -> Iterator[Any]:
        """Yield results in order (protocols.Executor.map, for one worker or more)."""
        mapping = Mapping(self, fn, workers)
        window: deque[RayTask] = deque()
        try:
            for item in items:
                window.append(RayTask(item))
                mapping.waiting.append(window[-1])
                if len(window) >= IN_HAND * workers:
                    yield mapping.result(window.popleft())
            while window:
                yield mapping.result(window.popleft())
        finally:
            mapping.close()

    def taken(self, count: int, fn: bytes) -> list[Worker]:
        """Return `count` workers that have loaded `fn`, idle ones first. Raises what unpickling `fn` raised there."""
        with self._lock:
            acquired, self._idle = self._idle[:count], self._idle[count:]
        actor_class: Any = ray.remote(PoolActor)
        # Workers request no CPU: ranks and engines reserve the CPUs, and grading runs at the same time.
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        actors = [actor_class.options(**options).remote() for _ in range(count - len(acquired))]
        try:
            locations = started([actor.enter.remote(self._environment) for actor in actors], f"{len(actors)} workers")
            acquired += [Worker(actor, place) for actor, place in zip(actors, locations, strict=True)]
            self._workers.update(acquired)
            ray.get([worker.actor.take.remote(fn) for worker in acquired])
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
        kill([worker.actor for worker in idle], [worker.location for worker in idle])


class Mapping:
    """One `map` call: assigns items to workers and collects results."""

    def __init__(self, pool: Pool, limited: Limited, workers: int) -> None:
        self.waiting: deque[RayTask] = deque()
        self._pool, self._limited, self._fn = pool, limited, cloudpickle.dumps(limited)
        self._free = pool.taken(workers, self._fn)
        self._busy: dict[Any, RayTask] = {}

    def result(self, task: RayTask) -> Any:
        """Wait for the result of a task. Other tasks proceed, except during a second attempt, which runs alone."""
        while True:
            while self.waiting and self._free:
                self._assign(self.waiting.popleft(), self._free.pop())
            if task.done and isinstance(task.result, TimeoutError) and not task.tried_again:
                self._try_alone(task)
            if task.done:
                return task.result
            self._step()

    def _try_alone(self, task: RayTask) -> None:
        while self._busy:
            self._step()
        task.tried_again, task.done = True, False
        self._assign(task, self._free.pop())
        while not task.done:
            self._step()

    def close(self) -> None:
        """Return idle workers to the pool, and end the ones that are working on an item."""
        self._pool.give_back(self._free)
        busy = [task.worker for task in self._busy.values() if task.worker]
        kill([worker.actor for worker in busy], [worker.location for worker in busy])
        self._free, self._busy = [], {}

    def _assign(self, task: RayTask, worker: Worker) -> None:
        task.worker, task.started = worker, time.monotonic()
        self._busy[worker.actor.work.remote(task.item)] = task

    def _step(self) -> None:
        """Wait for the next result, or until a worker counts as stuck."""
        # A worker ends itself at its limits. This one is for a worker that is stuck while it prepares, or cannot end.
        wall_s = self._limited.wall_s
        remaining_s = None
        if wall_s is not None:
            soonest = min(task.started for task in self._busy.values()) + wall_s + WARM_UP_S
            remaining_s = max(0.0, soonest - time.monotonic())
        ready, _ = ray.wait(list(self._busy), num_returns=1, timeout=remaining_s)
        for reference in ready:
            self._finish(self._busy.pop(reference), reference)
        if wall_s is None:
            return
        longest = time.monotonic() - wall_s - WARM_UP_S
        for reference in [reference for reference, task in self._busy.items() if task.started <= longest]:
            self._replace(self._busy.pop(reference), TimeoutError(f"took longer than {wall_s:g} s"))

    def _finish(self, task: RayTask, reference: Any) -> None:
        assert task.worker is not None
        try:
            task.result, task.done = ray.get(reference), True
        except ray.exceptions.RayTaskError as error:
            task.result, task.done = error.cause, True
        except ray.exceptions.RayError as error:
            reason = death_reason(error, task.worker.location)
            self._replace(task, self._overrun(task) or BackendError(f"the worker died on it ({reason})"))
            return
        self._free.append(task.worker)

    def _overrun(self, task: RayTask) -> TimeoutError | None:
        """Return the error of a task whose worker probably ended at a limit. Ray does not report the signal.

        All threads of the worker use its CPU time, including Ray's, so half of the wall time may have passed.
        """
        elapsed_s, cpu_s, wall_s = time.monotonic() - task.started, self._limited.cpu_s, self._limited.wall_s
        if wall_s is not None and elapsed_s >= wall_s:
            return overrun(WALL_SIGNAL, cpu_s, wall_s)
        return overrun(CPU_SIGNAL, cpu_s, wall_s) if cpu_s is not None and elapsed_s >= cpu_s / 2 else None

    def _replace(self, task: RayTask, result: BaseException) -> None:
        """Set the item's result to its worker's failure, and replace the worker."""
        assert task.worker is not None
        kill([task.worker.actor], [task.worker.location])
        task.result, task.done = result, True
        self._free += self._pool.taken(1, self._fn)
