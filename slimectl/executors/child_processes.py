"""Signals and output of child processes. Output goes to stderr or to a log, whose end explains a failure."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TypeVar

from slimectl.plugins.containment import ENDING, handle_here
from slimectl.system.stdio import log_to_stderr


@contextmanager
def blocked_in_helpers() -> Iterator[None]:
    """Block the signals while multiprocessing starts its helpers, which inherit the mask. Deliver them here afterwards.

    Python 3.11 and 3.12 end the tracker of semaphores by SIGHUP, and the fork server by both.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        resource_tracker.ensure_running()
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """Ignore the signals and Ctrl-C in a worker or a rank. Processes that it starts get the defaults."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ENDING:
        handle_here(number, lambda received, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


Failure = TypeVar("Failure", bound=BaseException)

TAIL_LINES = 20
"""Number of last lines of a log that are attached to an error."""
TAIL_BYTES = 16_384


def print_at_once() -> None:
    """Write each line that this process prints at once. What is in a buffer is lost when the process is ended."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def redirect(log: Path | None) -> None:
    """Redirect the output of this process and its children to `log`, or to stderr without one. Stdout is for data."""
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stderr.flush()
        os.dup2(file, 2)
        os.close(file)
    sys.stdout.flush()
    os.dup2(2, 1)
    print_at_once()
    log_to_stderr(positions=True)


def tail(log: Path) -> str:
    """Return the last lines of a log below its name, or "" if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([f"last lines of {log}:", *lines[-TAIL_LINES:]]) if lines else ""


def attach_log_tail(error: Failure, tail: str) -> Failure:
    """Attach the last log lines of its process to an error, as a note."""
    if tail:
        error.add_note(tail)
    return error


def log_files(logs: Path | None, ranks: int, living: int) -> list[Path] | None:
    """Return a log file per rank: rank-0.log, or rank-0.group-1.log while `living` 1 other group runs."""
    if logs is None:
        return None
    group = f".group-{living}" if living else ""
    return [logs / f"rank-{rank}{group}.log" for rank in range(ranks)]
