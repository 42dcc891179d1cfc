"""Executor of one machine: threads that prefetch, processes that work in parallel."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from slimectl.data.streams import prefetch
from slimectl.executors.rank_group import LocalRanks
from slimectl.protocols import Serve
from slimectl.stdio import log_to_stderr

Item = TypeVar("Item")
Result = TypeVar("Result")


class LocalExecutor:
    """Runs ranks, hosted objects, streams and worker pools on one machine; their processes live until `close`.

    Output of ranks goes to rank-0.log, … in `logs`; to stderr without it.
    """

    def __init__(self, *, logs: Path | None = None) -> None:
        self._logs = logs
        self._groups: list[LocalRanks] = []
        self._hosted = ExitStack()
        self._pool: Any = None
        self._workers = 0

    def group(self, serve: Serve, build: Callable[[], Any], *, ranks: int) -> LocalRanks:
        """Start N processes that join one torch.distributed group, then run `serve(build, pipe)`."""
        self._groups = [group for group in self._groups if not group.ended]
        rank_group = LocalRanks(serve, build, ranks=ranks, logs=self._logs, living=len(self._groups))
        self._groups.append(rank_group)
        return rank_group

    def host(self, build: Callable[[], Any], *, name: str, gpus: float = 0.0) -> Any:
        """Build the object in this process and return it; `close` closes it."""
        instance = build()
        self._hosted.callback(close_hosted, instance)
        return instance

    def stream(self, make: Callable[[], Iterator[Item]], *, ahead: int) -> Iterator[Item]:
        return prefetch(make, ahead=ahead)

    def map(
        self, fn: Callable[[Item], Result], items: Iterable[Item], *, workers: int, timeout_s: float | None = None
    ) -> Iterator[Result | BaseException]:
        """Yield results in order; `workers` 0 calls `fn` in this process, lazily, one item at a time.

        A worker that overruns `timeout_s` is killed and replaced, and its item's result is a TimeoutError. At most
        4 items per worker are in flight, so an endless input is fine.
        """
        if workers == 0:
            yield from map_here(fn, items)
            return
        pool = self._pool_of(workers)
        window: deque[Any] = deque()
        try:
            for item in items:
                window.append(pool.schedule(fn, args=[item], timeout=timeout_s))
                if len(window) >= 4 * workers:
                    yield _outcome(window.popleft(), timeout_s)
            while window:
                yield _outcome(window.popleft(), timeout_s)
        finally:
            for future in window:
                future.cancel()

    def _pool_of(self, workers: int) -> Any:
        if self._pool is None or self._workers != workers:
            from pebble import ProcessPool

            self._end_pool()
            # spawn: forking a process that holds torch's threads can deadlock.
            self._pool = ProcessPool(workers, context=get_context("spawn"), initializer=_set_up_worker)
            self._workers = workers
        return self._pool

    def close(self) -> None:
        """Close the hosted objects, end every process."""
        try:
            self._hosted.close()
        finally:
            while self._groups:
                self._groups.pop().end()
            self._end_pool()

    def _end_pool(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None


def _set_up_worker() -> None:
    """Send messages to stderr, and ignore Ctrl-C: it reaches the whole process group, the parent decides on it."""
    log_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def map_here(fn: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result | BaseException]:
    """Call `fn` in this process, lazily, one item at a time; an exception is the item's result."""
    for item in items:
        try:
            result: Result | BaseException = fn(item)
        except Exception as error:
            result = error
        yield result


def _outcome(future: Any, timeout_s: float | None) -> Any:
    from pebble import ProcessExpired

    try:
        return future.result()
    except FutureTimeout:
        return TimeoutError(f"took longer than {timeout_s:g} s")
    except ProcessExpired as error:
        code = error.exitcode or 0
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ChildProcessError(f"the worker process that graded it {ending}")
    except Exception as error:
        return error


def close_hosted(hosted: Any) -> None:
    """Call the object's `close`, if it has one; a coroutine is awaited."""
    close = getattr(hosted, "close", None)
    if close is not None and inspect.isawaitable(awaitable := close()):
        asyncio.run(_await(awaitable))


async def _await(awaitable: Any) -> None:
    await awaitable
