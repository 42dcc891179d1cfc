"""Executor for one machine: threads that prefetch, and processes that work in parallel."""

from __future__ import annotations

import inspect
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slimectl.data.streams import prefetch
from slimectl.errors import BackendError
from slimectl.executors.time_limits import WARM_UP_S, Limited, overrun, wall_limit
from slimectl.planner.placement import PartTable, Placement
from slimectl.protocols import Serve
from slimectl.system.event_loop import awaited, run_coroutine

if TYPE_CHECKING:
    from slimectl.executors.rank_group import LocalRanks
    from slimectl.executors.worker_pool import WorkerPool

Item = TypeVar("Item")
Result = TypeVar("Result")

IN_HAND = 4
"""Items per worker that are read from the input before their results are consumed."""


class LocalExecutor:
    """Runs ranks, hosted objects, streams and worker pools on one machine. Their processes live until `close`.

    Output of ranks goes to rank-0.log, … in `logs`, or to stderr without it. Hosted servers see only their own of the
    `gpus`, which are named as in CUDA_VISIBLE_DEVICES and divided among ranks and servers as in `placement`.
    """

    def __init__(
        self, *, logs: Path | None = None, placement: Placement | None = None, gpus: Sequence[str] = ()
    ) -> None:
        self._logs = logs
        self._parts = PartTable(placement) if placement else None
        self._gpus = gpus
        self._extra_places: dict[str, list[int]] = {}
        self._abandoned = threading.Event()
        self._groups: list[LocalRanks] = []
        self._hosted = ExitStack()
        self._pool: WorkerPool | None = None
        self._workers = 0

    def group(self, serve: Serve, build: Callable[[], Any], *, ranks: int) -> LocalRanks:
        """Start N processes that join one torch.distributed group, then run `serve(build, pipe)`."""
        from slimectl.executors.rank_group import LocalRanks

        self._groups = [group for group in self._groups if not group.ended]
        rank_group = LocalRanks(serve, build, ranks=ranks, logs=self._logs, living=len(self._groups))
        self._groups.append(rank_group)
        return rank_group

    def host(self, build: Callable[[], Any], *, name: str, gpus: float = 0.0) -> Any:
        """Build the object in this process and return it. `close` closes it."""
        instance = build()
        if gpus and self._parts is not None:
            instance.show_gpus([self._gpus[place] for place in self._places(name, int(gpus))])
        self._hosted.callback(close_hosted, instance)
        return instance

    def _places(self, name: str, gpus: int) -> list[int]:
        """Return the numbers of a server's GPUs: its part of the placement, or GPUs outside of it.

        Raises BackendError if too few are free.
        """
        assert self._parts is not None
        part = self._parts.assign(name, gpus)
        if part is not None:
            return self._parts.placement.of_part(part)
        used_places = {place for places in self._extra_places.values() for place in places}
        first = len(self._parts.placement.bundles)
        free = [place for place in range(first, len(self._gpus)) if place not in used_places]
        if name not in self._extra_places and len(free) < gpus:
            raise BackendError(
                f"{name} needs {gpus} free GPUs, but this machine has only {len(free)} free. Remove another engine, or "
                "use more machines (cluster.executor = ray)."
            )
        return self._extra_places.setdefault(name, free[:gpus])

    def end_host(self, name: str) -> None:
        self._extra_places.pop(name, None)
        if self._parts is not None:
            self._parts.release(name)

    def rank_beside(self, name: str) -> int | None:
        return self._parts.rank_beside(name) if self._parts is not None else None

    def stream(self, make: Callable[[], Iterator[Item]], *, ahead: int) -> Iterator[Item]:
        return prefetch(make, ahead=ahead, abandoned=self._abandoned)

    def abandon_streams(self) -> None:
        self._abandoned.set()

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
        in flight, so an endless input is fine.
        """
        if workers == 0:
            yield from map_here(fn, items)
            return
        pool, wall_s = self._pool_of(workers), wall_limit(timeout_s, wall_timeout_s)
        limited = Limited(fn, prepare, timeout_s, wall_s)

        def submit(item: Item) -> Future[Any]:
            # This limit is for a worker that is stuck while it prepares, or that blocks without letting threads run.
            return pool.submit(limited, item, timeout_s=None if wall_s is None else wall_s + WARM_UP_S)

        yield from in_order(
            submit, items, workers=workers, outcome=partial(_outcome, limited=limited), cancel=pool.cancel
        )

    def _pool_of(self, workers: int) -> WorkerPool:
        if self._pool is None or self._workers != workers:
            from slimectl.executors.worker_pool import WorkerPool

            self._end_pool()
            self._pool, self._workers = WorkerPool(workers), workers
        return self._pool

    def close(self) -> None:
        """Close the hosted objects and end every process."""
        try:
            self._hosted.close()
        finally:
            while self._groups:
                self._groups.pop().end()
            self._end_pool()

    def _end_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def in_order(
    submit: Callable[[Item], Future[Any]],
    items: Iterable[Item],
    *,
    workers: int,
    outcome: Callable[[Future[Any]], Any] = Future.result,
    cancel: Callable[[Future[Any]], object] = Future.cancel,
) -> Iterator[Any]:
    """Yield the outcomes of items in order, with at most IN_HAND items per worker in flight.

    An item that exceeds a limit is tried once more while no other is worked on. Items in flight are cancelled at the
    end.
    """
    window: deque[tuple[Item, Future[Any]]] = deque()

    def next_result() -> Any:
        item, future = window.popleft()
        result = outcome(future)
        if isinstance(result, TimeoutError):
            wait([pending for _, pending in window])
            result = outcome(submit(item))
        return result

    try:
        for item in items:
            window.append((item, submit(item)))
            if len(window) >= IN_HAND * workers:
                yield next_result()
        while window:
            yield next_result()
    finally:
        for _, future in window:
            cancel(future)


def map_here(fn: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result | BaseException]:
    """Call `fn` in this process, lazily, one item at a time. An exception becomes the item's result."""
    for item in items:
        try:
            result: Result | BaseException = fn(item)
        except Exception as error:
            result = error
        yield result


def _outcome(future: Future[Any], limited: Limited) -> Any | BaseException:
    from slimectl.executors.worker_pool import WorkerDiedError, WorkerStuckError

    try:
        return future.result()
    except WorkerStuckError:
        return TimeoutError(f"took longer than {limited.wall_s:g} s")
    except WorkerDiedError as error:
        code = error.exit_code
        if code < 0 and (late := overrun(-code, limited.cpu_s, limited.wall_s)):
            return late
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ChildProcessError(f"the worker process that graded it {ending}")
    except Exception as error:
        return error


def close_hosted(hosted: Any) -> None:
    """Call the object's `close`, if it has one, and await it if it is a coroutine."""
    close = getattr(hosted, "close", None)
    if close is not None and inspect.isawaitable(awaitable := close()):
        run_coroutine(awaited(awaitable))
