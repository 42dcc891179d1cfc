"""Ends a server process when the process that started it ends.

The parent is polled. The kernel's own signal (PR_SET_PDEATHSIG) is sent when the *thread* that started a process ends,
and servers are started from threads.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cleanup import OWN_TMP, kill_members, members, segments

PARENT = "SLIMECTL_PARENT"
"""Environment variable with the parent's process id. Without it, the parent is not watched."""

LEAVES = "SLIMECTL_LEAVES"
"""Environment variable with colon-separated paths of shared memory that the server leaves behind."""

INTERVAL_S = 0.5
PR_SET_PDEATHSIG = 1


def leave_with_parent() -> None:
    """Kill this process and its group soon after the parent has ended, for any reason."""
    if PARENT in os.environ:
        threading.Thread(target=_watch, daemon=True).start()


def run_apart(serve: Callable[[], None]) -> None:
    """Run `serve`, which blocks all other threads, in a child process. This process only watches the parent."""
    child = os.fork()
    if child == 0:
        if sys.platform == "linux":  # in case the watching process is killed itself
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        serve()
        return
    leave_with_parent()
    _, status = os.waitpid(child, 0)
    os._exit(max(0, os.waitstatus_to_exitcode(status)) or 1)


def _watch() -> None:
    parent = int(os.environ[PARENT])
    while os.getppid() == parent:
        time.sleep(INTERVAL_S)
    folder = os.environ.get("TMPDIR", "")
    if Path(folder).name.startswith(OWN_TMP):
        shutil.rmtree(folder, ignore_errors=True)
    leaves = [name for name in os.environ.get(LEAVES, "").split(":") if name]
    for segment in segments(members(os.getpgrp()), leaves):
        segment.unlink(missing_ok=True)
    kill_members(os.getpgrp(), but=os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)
