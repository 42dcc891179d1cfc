"""The engine in a thread of its own, so that a step never keeps the server from answering."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.engines.embedded.sequence import Sequence
from slimectl.errors import BackendError

Result = TypeVar("Result")
PATIENCE_S = 1.0
"""How long a step under way is waited for when all ends."""


class EngineThread:
    """An event loop that drives the engine; what it is told from the server's loop happens between two steps."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

    async def call(self, fn: Callable[[], Result]) -> Result:
        """What `fn` returns or raises, called between two steps."""

        async def called() -> Result:
            return fn()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), self._loop))

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; its future says if it could not be."""

        def queued() -> None:
            try:
                self.engine.submit(sequence)
            except BackendError as error:
                sequence.fail(error)

        self._loop.call_soon_threadsafe(queued)

    def end(self, sequence: Sequence) -> None:
        self._loop.call_soon_threadsafe(self.engine.end, sequence)

    def end_all(self) -> None:
        self._loop.call_soon_threadsafe(self.engine.end_all)

    def stop(self) -> bool:
        """End the thread; False if a step under way does not let it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            return False
        self._loop.close()
        return True


class Bell:
    """Wakes waiters of the server's loop from the engine's thread: one call across for all that a step woke."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung: deque[asyncio.Event] = deque()
        self._on_its_way = False

    def ring(self, event: asyncio.Event) -> None:
        """From any thread."""
        self._rung.append(event)
        if not self._on_its_way and not self._loop.is_closed():
            self._on_its_way = True
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        # First of all: what is rung from here on either is still seen below, or makes a call of its own.
        self._on_its_way = False
        while self._rung:
            self._rung.popleft().set()


async def apart(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises, from a thread that nobody has to wait for when all ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: Exception | None) -> None:
        if not future.done():
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

    def worked() -> None:
        try:
            outcome: tuple[Result | None, Exception | None] = (work(), None)
        except Exception as error:
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=worked, name="apart", daemon=True).start()
    return await future
