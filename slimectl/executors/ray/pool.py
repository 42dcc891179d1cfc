"""Actors that work in parallel on items, each on one at a time; results in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ray import cloudpickle

from slimectl.errors import BackendError
from slimectl.executors.rank import portable
from slimectl.executors.ray.deaths import cause, kill
from slimectl.executors.ray.library import ray
from slimectl.executors.ray.ranks import started
from slimectl.executors.ray.surroundings import Surroundings, Whereabouts

IN_HAND = 4
"""Items a worker that are taken from the input before their results are."""


class PoolActor:
    """Calls one function."""

    def __init__(self) -> None:
        self._fn: Any = None

    def enter(self, surroundings: Surroundings) -> Whereabouts:
        surroundings.enter(None)
        return Whereabouts.here()

    def take(self, fn: bytes) -> None:
        self._fn = cloudpickle.loads(fn)

    def work(self, item: Any) -> Any:
        try:
            return self._fn(item)
        except Exception as error:
            return portable(error, "a worker")


@dataclass(eq=False)
class Worker:
    actor: Any
    where: Whereabouts


@dataclass(eq=False)
class Task:
    """An item on its way to its result."""

    item: Any
    result: Any = None
    done: bool = False
    worker: Worker | None = None
    deadline: float = field(default=float("inf"))


class Pool:
    """Workers that are kept from one `map` to the next; several may run at once, each with workers of its own."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._idle: list[Worker] = []
        self._lock = threading.Lock()

    def map(
        self, fn: Callable[[Any], Any], items: Iterable[Any], *, workers: int, timeout_s: float | None
    ) -> Iterator[Any]:
        """ports.Executor.map, for one worker or more."""
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
        """So many workers that know `fn`, idle ones first. Raises what `fn` raised on being unpickled there."""
        with self._lock:
            found, self._idle = self._idle[:count], self._idle[count:]
        made = ray.remote(PoolActor)
        # They ask for no CPU: those of the machines are the ranks' and engines', and grading runs beside them.
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        actors = [made.options(**options).remote() for _ in range(count - len(found))]
        try:
            where = started([actor.enter.remote(self._surroundings) for actor in actors], f"{len(actors)} workers")
            found += [Worker(actor, place) for actor, place in zip(actors, where, strict=True)]
            ray.get([worker.actor.take.remote(fn) for worker in found])
        except ray.exceptions.RayTaskError as error:
            kill(actors, [])
            raise error.cause from error
        except BaseException:
            kill(actors, [])
            raise
        return found

    def give_back(self, workers: Iterable[Worker]) -> None:
        with self._lock:
            self._idle += workers

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        kill([worker.actor for worker in idle], [worker.where for worker in idle])


class Mapping:
    """One pass over items: who works on what."""

    def __init__(self, pool: Pool, fn: bytes, workers: int, timeout_s: float | None) -> None:
        self.waiting: deque[Task] = deque()
        self._pool, self._fn, self._timeout_s = pool, fn, timeout_s
        self._free = pool.taken(workers, fn)
        self._busy: dict[Any, Task] = {}

    def result(self, task: Task) -> Any:
        """The result of a task, once it is there; meanwhile the others go on."""
        while True:
            while self.waiting and self._free:
                self._begin(self.waiting.popleft(), self._free.pop())
            if task.done:
                return task.result
            self._step()

    def close(self) -> None:
        """Keep idle workers for the next pass; end those that are in the middle of an item."""
        self._pool.give_back(self._free)
        busy = [task.worker for task in self._busy.values() if task.worker]
        kill([worker.actor for worker in busy], [worker.where for worker in busy])
        self._free, self._busy = [], {}

    def _begin(self, task: Task, worker: Worker) -> None:
        task.worker = worker
        if self._timeout_s is not None:
            task.deadline = time.monotonic() + self._timeout_s
        self._busy[worker.actor.work.remote(task.item)] = task

    def _step(self) -> None:
        """Wait for the next result, or time limit."""
        soonest = min(task.deadline for task in self._busy.values())
        left = None if soonest == float("inf") else max(0.0, soonest - time.monotonic())
        ready, _ = ray.wait(list(self._busy), num_returns=1, timeout=left)
        for reference in ready:
            self._end(self._busy.pop(reference), reference)
        now = time.monotonic()
        for reference in [reference for reference, task in self._busy.items() if task.deadline <= now]:
            task = self._busy.pop(reference)
            self._replace(task, TimeoutError(f"took longer than {self._timeout_s:g} s"))

    def _end(self, task: Task, reference: Any) -> None:
        assert task.worker is not None
        try:
            task.result, task.done = ray.get(reference), True
        except ray.exceptions.RayTaskError as error:
            task.result, task.done = error.cause, True
        except ray.exceptions.RayError as error:
            self._replace(task, BackendError(f"the worker died on it ({cause(error, task.worker.where)})"))
            return
        self._free.append(task.worker)

    def _replace(self, task: Task, result: BaseException) -> None:
        """The item's result is what became of its worker; another takes the worker's place."""
        assert task.worker is not None
        kill([task.worker.actor], [task.worker.where])
        task.result, task.done = result, True
        self._free += self._pool.taken(1, self._fn)
