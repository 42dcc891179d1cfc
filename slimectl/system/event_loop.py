"""Runs coroutines from synchronous code, even if the calling thread already runs an event loop, as in Jupyter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_coroutine(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to completion on a new event loop, as `asyncio.run` does, and return its result."""
    return _in_free_thread(lambda: asyncio.run(work))


async def awaited(work: Awaitable[Result]) -> Result:
    """Await what may not be a coroutine, for functions of asyncio that accept only coroutines."""
    return await work


def run_on(loop: asyncio.AbstractEventLoop, work: Awaitable[Result]) -> Result:
    """Run the loop until `work` is done, even if another task calls sys.exit, which stops asyncio's loop.

    A KeyboardInterrupt in the calling thread is raised in the loop too, so that the loop stops.
    """
    task = asyncio.ensure_future(work, loop=loop)

    def run() -> Result:
        while True:
            try:
                return loop.run_until_complete(task)
            except SystemExit:
                if task.done():
                    raise

    def interrupt() -> None:
        if not task.done():
            raise KeyboardInterrupt

    return _in_free_thread(run, interrupt=lambda: loop.call_soon_threadsafe(interrupt))


def _in_free_thread(call: Callable[[], Result], *, interrupt: Callable[[], Any] = lambda: None) -> Result:
    """Call in this thread, or in a new one if this thread runs an event loop, because asyncio refuses a second loop."""
    if asyncio._get_running_loop() is None:
        return call()
    future: Future[Result] = Future()

    def settle() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=copy_context().run, args=(settle,), name="event loop", daemon=True)
    try:
        thread.start()
        return future.result()
    except KeyboardInterrupt:
        if thread.is_alive():
            interrupt()
            thread.join()
        raise
