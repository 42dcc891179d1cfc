"""Limits on the CPU time and the wall-clock time of one item in a worker process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

WALL_FACTOR = 12.0
"""Default wall-clock limit as a multiple of the CPU limit, because a process may wait for a core."""
WARM_UP_S = 300.0
"""Seconds that preparing a worker may take beyond the wall-clock limit."""

# The kernel ends the process by these signals, because no Python handler runs while C code computes a huge power.
CPU_SIGNAL = signal.SIGPROF
WALL_SIGNAL = signal.SIGVTALRM


def wall_limit(timeout_s: float | None, wall_timeout_s: float | None) -> float | None:
    """Return the wall-clock limit of an item, by default 12 times the limit on CPU time."""
    return wall_timeout_s if wall_timeout_s is not None or timeout_s is None else WALL_FACTOR * timeout_s


@dataclass(frozen=True)
class Limited:
    """Calls a function within time limits, after preparing the process for the item. It is picklable.

    A process that exceeds `cpu_s` seconds of CPU time, or `wall_s` seconds of wall-clock time, is ended by a signal.
    """

    function: Callable[[Any], Any]
    prepare: Callable[[Any], Any] | None
    cpu_s: float | None
    wall_s: float | None

    def __call__(self, item: Any) -> Any:
        if self.prepare is not None:
            self.prepare(item)
        with _end_process_after(self.cpu_s, self.wall_s):
            return self.function(item)


def overrun(signal_number: int, cpu_s: float | None, wall_s: float | None) -> TimeoutError | None:
    """Return the error of an item whose process was ended by this signal, or None if the signal is not a limit's."""
    if signal_number == CPU_SIGNAL and cpu_s is not None:
        return TimeoutError(f"took more than {cpu_s:g} s of CPU time")
    if signal_number == WALL_SIGNAL and wall_s is not None:
        return TimeoutError(f"took longer than {wall_s:g} s")
    return None


@contextmanager
def _end_process_after(cpu_s: float | None, wall_s: float | None) -> Iterator[None]:
    # A thread is enough for wall-clock time, because code that waits without using the CPU lets other threads run. An
    # alarm would not work: libraries that limit their own time set and clear the only alarm of the process.
    watch = threading.Timer(wall_s, os.kill, (os.getpid(), WALL_SIGNAL)) if wall_s is not None else None
    if watch is not None:
        watch.daemon = True
        watch.start()
    if cpu_s is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if watch is not None:
            watch.cancel()


def reset_signals() -> None:
    """Let the signals of the limits end this process, even if its parent ignored them."""
    signal.signal(CPU_SIGNAL, signal.SIG_DFL)
    signal.signal(WALL_SIGNAL, signal.SIG_DFL)
