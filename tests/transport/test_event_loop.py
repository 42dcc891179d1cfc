"""Coroutines that synchronous code runs, with and without an event loop in the calling thread."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import pytest

from slimectl.system.event_loop import run_coroutine, run_on

round_of: ContextVar[int] = ContextVar("round_of")


def plainly(call: Callable[[], object]) -> object:
    return call()


def in_a_running_loop(call: Callable[[], object]) -> object:
    async def main() -> object:
        return call()

    loop = asyncio.new_event_loop()  # asyncio.run would keep the first SIGINT from a call that does not await
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


@pytest.fixture(params=[plainly, in_a_running_loop])
def where(request: pytest.FixtureRequest) -> Callable[[Callable[[], object]], object]:
    return request.param


@pytest.fixture
def python_sigint() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, whatever an earlier test left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_result_the_error_and_the_context_are_those_of_the_coroutine(where):
    async def double() -> int:
        await asyncio.sleep(0)
        return 2 * round_of.get()

    async def fail() -> None:
        raise ValueError("no")

    round_of.set(21)
    assert where(lambda: run_coroutine(double())) == 42
    with pytest.raises(ValueError, match="no"):
        where(lambda: run_coroutine(fail()))


def test_a_loop_goes_on_where_it_stopped(where):
    loop = asyncio.new_event_loop()
    first, second = loop.create_task(asyncio.sleep(0, "first")), loop.create_task(asyncio.sleep(0.01, "second"))
    assert [where(lambda task=task: run_on(loop, task)) for task in (first, second)] == ["first", "second"]
    loop.close()


def test_an_interrupt_stops_the_work(where, python_sigint: None):
    """Ctrl-C, and the notebook's button, which sends the same signal."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    task = loop.create_task(asyncio.sleep(600))
    loop.call_soon(signal.pthread_kill, threading.main_thread().ident, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        where(lambda: run_on(loop, task))
    assert not task.done()
    assert not loop.is_running()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        run_on(loop, task)
    loop.close()
