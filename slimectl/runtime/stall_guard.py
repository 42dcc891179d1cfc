"""A process that ends a run whose own threads cannot run, because C code holds the interpreter's lock.

The run's watch (stall_watch.py) writes a byte to it at every look. Without one for the time-out, it names the cause
from the stacks that the interpreter writes on a signal, and kills the run with everything that it started.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from slimectl.system.processes import STATES, descendants, kill_processes, look_at
from slimectl.system.shared_memory import remove_blocks_of

if TYPE_CHECKING:
    from slimectl.runtime.stall_cause import StallReport

LOOK_S = 1.0
SPARE_S = 10.0
"""Seconds beyond the time-out, so that the watch of the run is first."""
PACKAGE = str(Path(__file__).parents[2])
MAIN = f"import sys; sys.path.append({PACKAGE!r}); from slimectl.runtime.stall_guard import main; main()"


class Guard:
    """The run's end of the guard process."""

    def __init__(self, report: StallReport) -> None:
        command = [sys.executable, "-P", "-c", MAIN]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        with suppress(OSError):
            os.write(self._pipe, json.dumps(asdict(report)).encode() + b"\n")
            os.set_blocking(self._pipe, False)

    def reassure(self) -> None:
        """Tell the guard that threads of this process run."""
        with suppress(OSError):
            os.write(self._pipe, b".")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> NoReturn:
    """Guard the parent process until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run decides when it ends
        signal.signal(number, signal.SIG_IGN)
    run, line = os.getppid(), b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1) or sys.exit(0)
    report = json.loads(line)
    silent_s = 0.0
    while silent_s < report["timeout_s"] + SPARE_S:
        is_ready, _, _ = select.select([0], [], [], LOOK_S)
        if os.getppid() != run or (is_ready and not os.read(0, 4096)):
            sys.exit(0)
        is_stopped = any(view.state in STATES for view in look_at([run]))
        silent_s = 0.0 if is_ready or is_stopped else silent_s + LOOK_S
    _end(run, report)


def _end(run: int, report: dict[str, object]) -> NoReturn:
    from slimectl.runtime.stall_cause import StallReport

    views = look_at([run, *(pid for pid in descendants(run) if pid != os.getpid())], stacks=True)
    if views:
        message = StallReport(**report).write(views[0], views[1:])  # type: ignore[arg-type]
        with suppress(OSError):
            os.write(2, f"slimectl: {message}\n".encode())
        killed = kill_processes(run, views[1:])
        with suppress(ProcessLookupError):
            os.kill(run, signal.SIGKILL)
        time.sleep(LOOK_S)
        remove_blocks_of({*killed, run})
    sys.exit(0)
