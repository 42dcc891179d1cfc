"""This machine: threads to work ahead, processes to work in parallel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing import get_context
from typing import Any, TypeVar

from slimectl.streams import prefetch

Item = TypeVar("Item")
Result = TypeVar("Result")


class LocalExecutor:
    """Carriers for iterators on one machine; worker processes live until `close`."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._workers = 0

    def stream(self, make: Callable[[], Iterator[Item]], *, ahead: int) -> Iterator[Item]:
        return prefetch(make, ahead=ahead)

    def map(
        self, fn: Callable[[Item], Result], items: Iterable[Item], *, workers: int, timeout_s: float | None = None
    ) -> Iterator[Result | BaseException]:
        """Results in order; `workers` 0 calls `fn` here, one item at a time, when its result is asked for.

        A worker that overruns `timeout_s` is killed and replaced, and its item's result is a TimeoutError. At most
        4 items a worker are in hand, so an endless input is fine.
        """
        if workers == 0:
            for item in items:
                yield _attempt(fn, item)
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

            self.close()
            # spawn: forking a process that holds torch's threads can deadlock.
            self._pool = ProcessPool(workers, context=get_context("spawn"), initializer=_leave_interrupts)
            self._workers = workers
        return self._pool

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None


def _leave_interrupts() -> None:
    """Ctrl-C reaches the whole process group; only the parent decides what it means."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _attempt(fn: Callable[[Item], Result], item: Item) -> Result | BaseException:
    try:
        return fn(item)
    except Exception as error:
        return error


def _outcome(future: Any, timeout_s: float | None) -> Any:
    try:
        return future.result()
    except FutureTimeout:
        return TimeoutError(f"took longer than {timeout_s:g} s")
    except Exception as error:
        return error
