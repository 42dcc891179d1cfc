"""Time limits for an agent's tools, so that one that hangs or blocks the event loop does not block a round."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import sysconfig
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from slimectl.system.stdio import logger

TICKS = 20
"""Number of checks per time limit."""
LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parents[1]))


class ToolTimeout:
    """Limits the seconds that one attempt spends outside of the model after its last response.

    Time is counted in ticks of the event loop, so no time passes while the loop is stopped because no consumer waits
    for samples. A tool that blocks the loop stops its ticks, so the `watchdog` interrupts it.
    """

    def __init__(
        self, generate: Callable[..., Awaitable[Any]], limit_s: float, watchdog: BlockedLoopWatchdog | None = None
    ) -> None:
        self._generate = generate
        self._limit_s = limit_s
        self._watchdog = watchdog or BlockedLoopWatchdog(limit_s)
        self._pending_requests = 0
        self._spent_s = 0.0

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Forward a request to the engine. Its time does not count as tool time."""
        self._pending_requests += 1
        try:
            return await self._generate(*args, **kwargs)
        finally:
            self._pending_requests -= 1
            self._spent_s = 0.0

    async def result(self, work: Awaitable[Any]) -> Any:
        """Return the agent's result. Raises TimeoutError, and cancels the agent, when its tools exceed the limit."""
        task = asyncio.ensure_future(self._watchdog.run(work))
        tick_s = self._limit_s / TICKS
        try:
            while not (await asyncio.wait({task}, timeout=tick_s))[0]:
                self._spent_s += 0.0 if self._pending_requests else tick_s
                if self._spent_s >= self._limit_s:
                    raise TimeoutError(
                        f"its tools took more than rollout.tool_timeout_s: {self._limit_s:g} s. "
                        f"Make them faster, or raise the limit."
                    )
            return task.result()
        finally:
            task.cancel()


class LoopBlocked(BaseException):
    """Raised inside an agent that blocks its event loop. The agent's `except Exception` does not catch it."""


class BlockedLoopWatchdog:
    """Interrupts a step of an agent that blocks the event loop, and so all other attempts, for longer than a limit.

    A thread watches while a step runs. It logs the line that blocks, and raises LoopBlocked there. Python code stops at
    once, and a call outside of Python when it returns. The steps of a watchdog run in one thread.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._step: tuple[int, float] | None = None
        """Thread of the running step, and its start time."""
        self._has_raised = False
        self._attempts = 0
        self._end = threading.Event()

    async def run(self, work: Awaitable[Any]) -> Any:
        """Return the result of an agent. Raises TimeoutError if one of its steps took longer than the limit."""
        self._attempts += 1
        if self._attempts == 1:
            self._end = threading.Event()
            threading.Thread(target=self._watch, args=(self._end,), name="blocked loop", daemon=True).start()
        try:
            return await _Steps(work, self)
        except LoopBlocked:
            raise self.error() from None
        finally:
            self._attempts -= 1
            if not self._attempts:
                self._end.set()

    def error(self) -> TimeoutError:
        """Return the error of an attempt that blocked the loop."""
        return TimeoutError(
            f"it blocked all other attempts for more than rollout.tool_timeout_s: {self._limit_s:g} s. Run blocking "
            f"calls with asyncio.to_thread, or raise the limit"
        )

    def __enter__(self) -> None:
        """Start a step of the agent."""
        self._has_raised = False
        self._step = threading.get_ident(), time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the step. If the thread has set an exception that was not raised yet, withdraw it."""
        self._step = None
        with self._lock:  # if the thread still saw the step, it has already set its exception
            if self._has_raised and kind is not LoopBlocked:
                _set_exception(threading.get_ident(), None)
            self._has_raised = False

    def _watch(self, end: threading.Event) -> None:
        while not end.wait(self._limit_s / TICKS):
            step = self._step
            if step is None or time.monotonic() - step[1] < self._limit_s or self._has_raised:
                continue
            with self._lock:
                if self._step is not step:
                    continue
                place = _place(sys._current_frames().get(step[0]))
                self._has_raised = True
                _set_exception(step[0], LoopBlocked)
            logger.warning(
                f"{place} has blocked all attempts for {self._limit_s:g} s (rollout.tool_timeout_s), so its attempt "
                f"ends. Run blocking calls with asyncio.to_thread"
            )


class _Steps:
    """An awaitable that runs each step, up to its next wait, under a watchdog."""

    def __init__(self, work: Awaitable[Any], watchdog: BlockedLoopWatchdog) -> None:
        self._work, self._watchdog = work, watchdog

    def __await__(self) -> Generator[Any, None, Any]:
        steps = self._work.__await__()
        error: BaseException | None = None
        while True:
            try:
                with self._watchdog:
                    awaited = next(steps) if error is None else _throw(steps, error)
            except StopIteration as end:
                return end.value
            try:
                yield awaited
                error = None
            except GeneratorExit:
                _close(steps)
                raise
            except BaseException as raised:  # e.g. a cancellation
                error = raised


def _throw(steps: Any, error: BaseException) -> Any:
    """Raise an error where the steps wait, or here if the awaitable is not a generator."""
    if not hasattr(steps, "throw"):
        raise error
    return steps.throw(error)


def _close(steps: Any) -> None:
    if hasattr(steps, "close"):
        steps.close()


def _set_exception(thread: int, kind: type[BaseException] | None) -> None:
    """Make a thread raise an exception at its next Python instruction. None withdraws one that was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None if kind is None else ctypes.py_object(kind))


def _place(frame: FrameType | None) -> str:
    """Return file, line and function of the innermost frame of the user's code."""
    while frame is not None and frame.f_code.co_filename.startswith((*LIBRARIES, "<")):
        frame = frame.f_back
    return "an agent" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
