"""Shows the watchdog of a run (runtime/stall_watch.py) the progress and the Python stacks of this process.

A process that a run starts calls `expose`. It then has an open memory file, named after it: a counter of its progress,
and behind it the stacks of its threads, which the interpreter writes on a signal, even while C code runs.
"""

from __future__ import annotations

import asyncio
import faulthandler
import mmap
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STACK_SIGNAL = signal.SIGUSR1
PREFIX = "slimectl:"
"""Prefix of the names of memory files."""
PAGE = mmap.PAGESIZE
"""Bytes before the stacks."""
PROGRESS, REQUESTED, OWNER, DESCRIBES = range(4)
"""Cells of the memory file: progress, number of the last request, process id, and whether requests are answered."""
POLL_S = 0.5
"""Seconds between checks for a request."""

_cells: Any = array("Q", [0] * 4)


def note_progress() -> None:
    """Count a step of the work: sampled tokens, a graded call, a pack, a tensor that was read, sent or written."""
    _cells[PROGRESS] += 1


def progress_count() -> int:
    """Return the number of steps of this process."""
    return int(_cells[PROGRESS])


def expose(name: str, *, describe: Callable[[], str] | None = None) -> None:
    """Let the run that started this process see it as `name`. Does nothing without Linux's memory files.

    With `describe`, such as `own_stacks`, a thread answers requests for stacks with more detail.
    """
    global _cells
    if not hasattr(os, "memfd_create"):
        return
    fd = os.memfd_create(PREFIX + name)
    os.ftruncate(fd, PAGE)
    os.lseek(fd, PAGE, os.SEEK_SET)
    _cells = memoryview(mmap.mmap(fd, PAGE)).cast("Q")
    _cells[OWNER] = os.getpid()
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)
    if describe is not None:
        _cells[DESCRIBES] = 1
        threading.Thread(target=_answer_requests, args=(_cells, fd, describe), name="liveness", daemon=True).start()


def _answer_requests(cells: Any, fd: int, describe: Callable[[], str]) -> None:
    answered = 0
    while True:
        time.sleep(POLL_S)
        if (request := cells[REQUESTED]) != answered:
            os.write(fd, describe().encode(errors="replace"))
            answered = request


def own_stacks() -> str:
    """Return the stacks of all other threads and waiting coroutines of this process, in faulthandler's format.

    A comment behind a frame names what it works on: the hook, the server, the file, the layer.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, innermost in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        frames = list(_frames(innermost))
        lines += [f'Thread "{names.get(ident, ident)}" (most recent call first):', *map(_line, frames), ""]
        loops = [frame.f_locals.get("self") for frame in frames if frame.f_code.co_name == "run_forever"]
        for task in (task for loop in loops for task in asyncio.all_tasks(loop)):
            inner = list(_coroutine_frames(task.get_coro()))[::-1]
            lines += [f'Task "{task.get_name()}" (most recent call first):', *map(_line, inner), ""]
    return "\n".join(lines) + "\n"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _coroutine_frames(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of what it awaits, outermost first."""
    while awaited is not None:
        frame = next((f for name in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(awaited, name, None))), None)
        if frame is not None:
            yield frame
        following = (getattr(awaited, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await"))
        awaited = next((inner for inner in following if inner is not None), None)
        if awaited is None and frame is not None:
            awaited = frame.f_locals.get("steps")  # stages/tool_timeout.py runs a coroutine step by step


def _line(frame: FrameType) -> str:
    code = frame.f_code
    detail = _detail(frame)
    comment = f"  # {detail}" if detail else ""
    return f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}{comment}'


def _detail(frame: FrameType) -> str:
    """Return what a frame of slimectl, or a layer of FSDP, works on, or "" if its variables do not tell."""
    file = frame.f_code.co_filename
    if file.endswith("_fsdp_param_group.py"):
        return str(getattr(frame.f_locals.get("self"), "_module_fqn", None) or "")
    if "/slimectl/" not in file:
        return ""
    if file.endswith("/plugins/callables.py"):
        owner: Any = frame.f_locals.get("self")
        return str(owner.name) if hasattr(owner, "setting") else ""
    values = (frame.f_locals.get(name) for name in ("url", "path", "name"))
    return next((" ".join(str(value).split()) for value in values if isinstance(value, str | os.PathLike)), "")
