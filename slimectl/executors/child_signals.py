"""Signals of child processes: what ends a command reaches all of them, and the command alone decides on it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from slimectl.user_code import ENDING, handle_here


@contextmanager
def blocked_in_helpers() -> Iterator[None]:
    """Block the signals while helpers of multiprocessing are started, which inherit that; here they come afterwards.

    Python 3.11 and 3.12 end the tracker of semaphores by SIGHUP, and the fork server by both.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        resource_tracker.ensure_running()
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """Let the signals, and Ctrl-C, pass in a worker or a rank; processes that it starts get their defaults."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ENDING:
        handle_here(number, lambda received, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
