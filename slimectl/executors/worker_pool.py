"""Pool of worker processes. A thread serves each process, so it knows which call the process died in."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, NoReturn

from slimectl.executors.child_processes import blocked_in_helpers, leave_to_parent, print_at_once
from slimectl.executors.rank_process import picklable_error
from slimectl.executors.time_limits import reset_signals
from slimectl.plugins.containment import ENDING, exit_at_once
from slimectl.system.liveness import expose
from slimectl.system.stdio import log_to_stderr

STOP_SIGNAL = signal.SIGUSR2
"""Signal with which the parent ends a worker. It is not SIGTERM, which a scheduler sends to all processes of a job."""
GRACE_S = 3.0
"""Seconds for a worker's clean-up before it is killed."""
BEGUN = b"begun"
"""What a worker sends when it has received a call."""
LOOK_S = 0.5
"""Seconds between checks for a dead worker whose pipe is held open by a process that it started."""


class WorkerDiedError(Exception):
    """The process of a call ended. `exit_code` is negative for a signal."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the worker process ended with exit code {exit_code}")
        self.exit_code = exit_code


class WorkerStuckError(Exception):
    """The process of a call was ended because it had not answered in time."""


@dataclass(eq=False)
class _Call:
    """A function, its argument, and the future of its result."""

    function: Callable[[Any], Any]
    item: Any
    timeout_s: float | None
    future: Future[Any] = field(default_factory=Future)


class WorkerPool:
    """Processes that call functions, one call at a time each. A process is started when it is first needed."""

    def __init__(self, size: int) -> None:
        self._owner = os.getpid()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        with blocked_in_helpers():
            self._workers = [_Worker(self._calls) for _ in range(size)]
        # A program that ends without `close` would wait for its workers, which wait for their next call.
        atexit.register(self.close)

    def submit(self, function: Callable[[Any], Any], item: Any, *, timeout_s: float | None) -> Future[Any]:
        """Call `function(item)` in a worker. The function, the item and the result are pickled.

        The future raises what the function raised, WorkerDiedError if the process ended, and WorkerStuckError if it did
        not answer within `timeout_s` seconds. The start of a process counts towards that time.
        """
        call = _Call(function, item, timeout_s)
        self._calls.put(call)
        return call.future

    def cancel(self, future: Future[Any]) -> None:
        """Cancel a call, and end the process that is working on it."""
        if not future.cancel():
            for worker in self._workers:
                worker.stop(future)

    def close(self) -> None:
        """End the processes. Waiting calls are cancelled, and running ones raise WorkerDiedError."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:
            return  # a forked child is exiting, and the workers still belong to its parent
        for worker in self._workers:
            worker.close()
        for _ in self._workers:
            self._calls.put(None)
        for worker in self._workers:
            worker.join()


class _Worker:
    """A process, replaced when it has ended, and the thread that sends it calls and receives their results."""

    def __init__(self, calls: SimpleQueue[_Call | None]) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._kill_at = float("inf")
        """When to kill the process after it was told to stop (time.monotonic)."""
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="slimectl-worker", daemon=True)
        self._thread.start()

    def stop(self, future: Future[Any]) -> None:
        """End the process if it is working on this call."""
        with self._lock:
            if self._future is future:
                self._stop()

    def close(self) -> None:
        """Start no more calls, and end the process."""
        with self._lock:
            self._closed = True
            self._stop()

    def join(self) -> None:
        """Wait until the process and the thread have ended."""
        self._thread.join()

    def _stop(self) -> None:
        """Tell the process to stop, now or as soon as it has started."""
        self._kill_at = time.monotonic() + GRACE_S
        self._signal(STOP_SIGNAL)

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and process.pid is not None and process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _serve(self) -> None:
        # Processes inherit this mask, so a signal that arrives before `_set_up` has set its handlers waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})
        while (call := self._calls.get()) is not None:
            with self._lock:
                if self._closed:
                    call.future.cancel()
                if not call.future.set_running_or_notify_cancel():
                    continue
                self._future = call.future
            try:
                result = self._call(call)
            except BaseException as error:
                self._finish()
                call.future.set_exception(error)
            else:
                self._finish()
                call.future.set_result(result)
        if self._process is not None:
            self._reap()

    def _finish(self) -> None:
        """End the call. A process that was stopped while it answered serves no other call."""
        with self._lock:
            self._future = None
        if self._kill_at < float("inf") and self._process is not None:
            self._reap()

    def _call(self, call: _Call) -> Any:
        request = ForkingPickler.dumps((call.function, call.item))
        deadline = float("inf") if call.timeout_s is None else time.monotonic() + call.timeout_s
        if self._process is not None and self._process.exitcode is not None:
            self._reap()  # it ended between two calls
        was_idle, has_begun = self._process is not None, False
        if self._process is None:
            self._start()
        try:
            assert self._pipe is not None
            self._pipe.send_bytes(request)
            self._wait(deadline)
            has_begun = self._pipe.recv_bytes() == BEGUN
            self._wait(deadline)
            reply = self._pipe.recv_bytes()
        except (EOFError, OSError):
            was_stopped = self._kill_at < float("inf")
            exit_code = self._reap()
            if was_idle and not (has_begun or was_stopped):  # it ended before it got this call
                return self._call(call)
            raise WorkerDiedError(exit_code) from None
        except WorkerStuckError:
            with self._lock:
                self._stop()
            self._reap()
            raise
        returned, value = pickle.loads(reply)
        if not returned:
            raise value
        return value

    def _wait(self, deadline: float) -> None:
        """Wait until the process has answered.

        Raises EOFError if it has ended, or is to be killed, and WorkerStuckError at the deadline.
        """
        assert self._process is not None
        assert self._pipe is not None
        while (remaining_s := min(deadline, self._kill_at) - time.monotonic()) > 0:
            wait([self._pipe, self._process.sentinel], min(LOOK_S, remaining_s))
            ended = self._process.exitcode is not None  # checked before the pipe, which may still hold a result
            if self._pipe.poll():
                return
            if ended:
                raise EOFError
        raise WorkerStuckError if deadline < self._kill_at else EOFError

    def _start(self) -> None:
        context = get_context("spawn")  # forking this process, with torch's threads, can deadlock
        pipe, end_of_worker = context.Pipe()
        process = context.Process(target=_work, args=(end_of_worker,), name="slimectl-worker")
        with end_of_worker:
            process.start()
        with self._lock:
            self._process, self._pipe = process, pipe
            if self._kill_at < float("inf"):
                self._signal(STOP_SIGNAL)

    def _reap(self) -> int:
        """Wait until the process ends, kill it if it does not, and return its exit code."""
        assert self._process is not None
        assert self._pipe is not None
        self._pipe.close()
        self._wait_for_end(min(self._kill_at, time.monotonic() + GRACE_S))
        self._signal(signal.SIGKILL)
        self._wait_for_end(time.monotonic() + GRACE_S)
        with self._lock:
            process, self._process, self._pipe = self._process, None, None
            if not self._closed:
                self._kill_at = float("inf")
        return process.exitcode or 0

    def _wait_for_end(self, deadline: float) -> None:
        # Poll the exit code: the system may report the end to a thread that starts another process.
        while self._process is not None and self._process.exitcode is None:
            if (remaining_s := deadline - time.monotonic()) <= 0:
                return
            wait([self._process.sentinel], remaining_s)
            time.sleep(0.001)


def _work(pipe: Connection) -> None:
    """Answer calls until the parent closes the pipe, or has ended."""
    _set_up()
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        pipe.send_bytes(BEGUN)
        pipe.send_bytes(_answer(request))


def _answer(request: bytes) -> Any:
    """Return (True, result), or (False, exception) of a call, pickled."""
    try:
        function, item = pickle.loads(request)
        return ForkingPickler.dumps((True, function(item)))
    except Exception as error:
        return ForkingPickler.dumps((False, picklable_error(error, "a worker")))


def _set_up() -> None:
    """Send messages to stderr, and ignore the signals that end a command, which the parent handles.

    Ctrl-C and a closed terminal reach the whole process group. A scheduler's SIGTERM reaches all processes of a job.
    """
    log_to_stderr()
    print_at_once()
    reset_signals()
    signal.signal(STOP_SIGNAL, _exit)
    expose("worker")
    leave_to_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _exit(*_: Any) -> NoReturn:
    """End the process with the clean-up of multiprocessing, but without freeing every module.

    As a signal handler it may interrupt a user's function, which could catch any exception raised here.
    """
    try:
        util._exit_function()  # type: ignore[attr-defined]
    finally:
        exit_at_once(1)
