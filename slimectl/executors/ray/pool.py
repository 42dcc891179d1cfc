"""Worker pool of actors: each works on one item at a time; results come in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ray import cloudpickle

from slimectl.errors import BackendError
from slimectl.executors.rank_process import picklable_error
from slimectl.executors.ray.cluster import ActorLocation, DriverEnvironment, ray
from slimectl.executors.ray.failures import death_reason, kill
from slimectl.executors.ray.rank_group import started

IN_HAND = 4
"""Items per worker that are read from the input before their results are consumed."""


class PoolActor:
    """Worker actor that calls one function."""

    def __init__(self) -> None:
        self._fn: Any = None

    def enter(self, surroundings: DriverEnvironment) -> ActorLocation:
        surroundings.enter(None)
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
class Task:
    """Item in flight, and its result once it is done."""

    item: Any
    result: Any = None
    done: bool = False
    worker: Worker | None = None
    deadline: float = field(default=float("inf"))


class Pool:
    """Workers that are reused from one `map` to the next; several maps may run at once, each with separate workers."""

    def __init__(self, surroundings: DriverEnvironment) -> None:
        self._surroundings = surroundings
        self._idle: list[Worker] = []
        self._lock = threading.Lock()

    def map(
        self, fn: Callable[[Any], Any], items: Iterable[Any], *, workers: int, timeout_s: float | None
    ) -> Iterator[Any]:
        """Yield results in order (protocols.Executor.map, for one worker or more)."""
        mapping = Mapping(self, cloudpickle.dumps(fn), workers, timeout_s)
        window: deque[Task] = deque()
        try:
            for item in items:
                window.append(Task(item))
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
        # They ask for no CPU: those of the machines are the ranks' and engines', and grading runs beside them.
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        actors = [actor_class.options(**options).remote() for _ in range(count - len(acquired))]
        try:
            locations = started([actor.enter.remote(self._surroundings) for actor in actors], f"{len(actors)} workers")
            acquired += [Worker(actor, place) for actor, place in zip(actors, locations, strict=True)]
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

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        kill([worker.actor for worker in idle], [worker.location for worker in idle])


class Mapping:
    """One `map` call: assigns items to workers and collects results."""

    def __init__(self, pool: Pool, fn: bytes, workers: int, timeout_s: float | None) -> None:
        self.waiting: deque[Task] = deque()
        self._pool, self._fn, self._timeout_s = pool, fn, timeout_s
        self._free = pool.taken(workers, fn)
        self._busy: dict[Any, Task] = {}

    def result(self, task: Task) -> Any:
        """Wait for the result of a task; other tasks proceed meanwhile."""
        while True:
            while self.waiting and self._free:
                self._assign(self.waiting.popleft(), self._free.pop())
            if task.done:
                return task.result
            self._step()

    def close(self) -> None:
        """Return idle workers to the pool; end those that are in the middle of an item."""
        self._pool.give_back(self._free)
        busy = [task.worker for task in self._busy.values() if task.worker]
        kill([worker.actor for worker in busy], [worker.location for worker in busy])
        self._free, self._busy = [], {}

    def _assign(self, task: Task, worker: Worker) -> None:
        task.worker = worker
        if self._timeout_s is not None:
            task.deadline = time.monotonic() + self._timeout_s
        self._busy[worker.actor.work.remote(task.item)] = task

    def _step(self) -> None:
        """Wait for the next result, or time limit."""
        soonest = min(task.deadline for task in self._busy.values())
        remaining_s = None if soonest == float("inf") else max(0.0, soonest - time.monotonic())
        ready, _ = ray.wait(list(self._busy), num_returns=1, timeout=remaining_s)
        for reference in ready:
            self._finish(self._busy.pop(reference), reference)
        now = time.monotonic()
        for reference in [reference for reference, task in self._busy.items() if task.deadline <= now]:
            task = self._busy.pop(reference)
            self._replace(task, TimeoutError(f"took longer than {self._timeout_s:g} s"))

    def _finish(self, task: Task, reference: Any) -> None:
        assert task.worker is not None
        try:
            task.result, task.done = ray.get(reference), True
        except ray.exceptions.RayTaskError as error:
            task.result, task.done = error.cause, True
        except ray.exceptions.RayError as error:
            self._replace(task, BackendError(f"the worker died on it ({death_reason(error, task.worker.location)})"))
            return
        self._free.append(task.worker)

    def _replace(self, task: Task, result: BaseException) -> None:
        """Set the item's result to its worker's failure, and replace the worker."""
        assert task.worker is not None
        kill([task.worker.actor], [task.worker.location])
        task.result, task.done = result, True
        self._free += self._pool.taken(1, self._fn)
