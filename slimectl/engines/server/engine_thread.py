"""Runs the engine in its own thread, so that a step never blocks the server."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.engines.embedded.scheduler import RunningSequence
from slimectl.errors import BackendError

Result = TypeVar("Result")
PATIENCE_S = 1.0
"""Seconds to wait for the current step at shutdown."""


class EngineThread:
    """An event loop that drives the engine. Calls from the server's loop run between two steps."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

    async def call(self, fn: Callable[[], Result]) -> Result:
        """Call `fn` between two steps, and return its result or raise its error."""

        async def call_fn() -> Result:
            return fn()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call_fn(), self._loop))

    def submit(self, sequence: RunningSequence) -> None:
        """Queue a sequence. Its future gets the error if the engine rejects it."""

        def submit_to_engine() -> None:
            try:
                self.engine.submit(sequence)
            except BackendError as error:
                sequence.fail(error)

        self._loop.call_soon_threadsafe(submit_to_engine)

    def end(self, sequence: RunningSequence) -> None:
        self._loop.call_soon_threadsafe(self.engine.end, sequence)

    def end_all(self) -> None:
        self._loop.call_soon_threadsafe(self.engine.end_all)

    def stop(self) -> bool:
        """End the thread. Return False if the current step does not end in time."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            return False
        self._loop.close()
        return True


class LoopNotifier:
    """Wakes waiters in the server's loop from the engine's thread, with one call for all waiters of a step."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[asyncio.Event] = deque()
        self._wake_scheduled = False

    def ring(self, event: asyncio.Event) -> None:
        """Set an event of the server's loop. Thread-safe."""
        self._events.append(event)
        if not self._wake_scheduled and not self._loop.is_closed():
            self._wake_scheduled = True
            self._loop.call_soon_threadsafe(self._set_events)

    def _set_events(self) -> None:
        # Must come first: an event added after this is either set below or schedules another call.
        self._wake_scheduled = False
        while self._events:
            self._events.popleft().set()


async def run_in_daemon_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a daemon thread, which shutdown does not wait for. Return its result or raise its error."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: Exception | None) -> None:
        if not future.done():
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

    def run() -> None:
        try:
            outcome: tuple[Result | None, Exception | None] = (work(), None)
        except Exception as error:
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="apart", daemon=True).start()
    return await future
