"""Runs the calls of a grader in this thread, on servers or in worker processes, with results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

from slimectl.protocols import Executor
from slimectl.settings.score import ScoreSettings
from slimectl.stages.grader import BatchedReward, default_workers
from slimectl.system.client import HttpClient
from slimectl.types import Sample

CallResult = tuple[list[Sample], list[Any] | BaseException]
"""The samples of a call, and their rewards or their common error."""


class GradingCalls:
    """Grades the calls of one stream of samples.

    With settings.workers, all calls run in worker processes (0: in this process). Otherwise they run in this process,
    on demand, until the first call that can be slow. From then on they run in worker processes, except calls that wait
    for servers.
    """

    def __init__(self, grader: BatchedReward, settings: ScoreSettings, executor: Executor) -> None:
        self._grader, self._settings, self._executor = grader, settings, executor
        self._input_ended = False
        self._client: HttpClient | None = None

    def results(self, calls: Iterable[list[Sample]]) -> Iterator[CallResult]:
        """Yield every call with its result, in order."""
        workers, calls = self._settings.workers, iter(calls)
        if workers is not None:
            yield from self._in_workers(calls, workers) if workers else self._in_thread(calls)
            return
        slow: list[list[Sample]] = []
        yield from self._in_thread(self._until_slow(calls, slow))
        if slow:
            yield from self._mixed(chain(slow, calls), default_workers())

    def _until_slow(self, calls: Iterable[list[Sample]], slow: list[list[Sample]]) -> Iterator[list[Sample]]:
        """Yield the calls before the first slow one, which is appended to `slow`."""
        for call in calls:
            if self._grader.is_slow(call):
                slow.append(call)
                return
            yield call

    def _in_thread(self, calls: Iterable[list[Sample]]) -> Iterator[CallResult]:
        """Grade in this thread on demand. Calls that wait for a server run concurrently."""
        window: deque[tuple[list[Sample], Future[list[Any]] | None]] = deque()
        with ExitStack() as closing:
            for call in calls:
                window.append((call, self._submit(call, closing) if self._grader.is_async(call) else None))
                while window and (len(window) >= self._settings.concurrency or _is_ready(window[0][1])):
                    yield self._waited_for(*window.popleft())
            while window:
                yield self._waited_for(*window.popleft())

    def _in_workers(self, calls: Iterable[list[Sample]], workers: int) -> Iterator[CallResult]:
        order: deque[list[Sample]] = deque()

        def submitted() -> Iterator[list[Sample]]:
            for call in calls:
                order.append(call)
                yield call

        with _closing(self._map(submitted(), workers)) as results:
            for result in results:
                yield order.popleft(), result

    def _mixed(self, calls: Iterator[list[Sample]], workers: int) -> Iterator[CallResult]:
        """Grade in worker processes. Calls that wait for servers run concurrently in this process."""
        order: deque[tuple[list[Sample], Future[list[Any]] | None]] = deque()
        self._input_ended = False
        with ExitStack() as closing:
            while not self._input_ended:
                with _closing(self._map(self._segment(calls, order, workers, closing), workers)) as results:
                    for result in results:
                        while order[0][1] is not None:
                            yield self._waited_for(*order.popleft())
                        yield order.popleft()[0], result
                while order:
                    yield self._waited_for(*order.popleft())

    def _segment(
        self,
        calls: Iterator[list[Sample]],
        order: deque[tuple[list[Sample], Future[list[Any]] | None]],
        workers: int,
        closing: ExitStack,
    ) -> Iterator[list[Sample]]:
        """Yield calls for workers and submit the others, until too many results are waiting for their turn."""
        concurrency = self._settings.concurrency
        while len(order) < 4 * workers + 2 * concurrency:
            call = next(calls, None)
            if call is None:
                self._input_ended = True
                return
            if self._grader.is_slow(call) or not self._grader.is_async(call):
                order.append((call, None))
                yield call
                continue
            pending = [future for _, future in order if future is not None and not future.done()]
            if len(pending) >= concurrency:
                wait(pending, return_when=FIRST_COMPLETED)
            order.append((call, self._submit(call, closing)))

    def _submit(self, call: list[Sample], closing: ExitStack) -> Future[list[Any]]:
        """Send a call to its servers. `closing` closes the HTTP client."""
        if self._client is None:
            self._client = closing.enter_context(HttpClient())
            closing.callback(setattr, self, "_client", None)
        return self._client.submit(self._grader.grade_async(call, self._client))

    def _map(self, calls: Iterator[list[Sample]], workers: int) -> Iterator[list[Any] | BaseException]:
        limits, patience_s = self._settings, self._grader.patience_s
        return self._executor.map(
            self._grader.grade, calls, workers=workers, timeout_s=limits.timeout_s,
            wall_timeout_s=limits.wall_limit_s + patience_s, prepare=self._grader.prepare,
        )  # fmt: skip

    def _waited_for(self, call: list[Sample], future: Future[list[Any]] | None) -> CallResult:
        try:
            return call, self._grader.grade(call) if future is None else future.result()
        except Exception as error:
            return call, error


def _is_ready(future: Future[list[Any]] | None) -> bool:
    return future is None or future.done()


@contextmanager
def _closing(results: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """Close a generator at the end of the block, rather than when it is garbage-collected after an error."""
    try:
        yield results
    finally:
        if isinstance(results, Generator):
            results.close()
