"""Ends a run that makes no progress, and names the part that is stuck."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from slimectl.errors import StalledError
from slimectl.protocols import ProcessLister
from slimectl.runtime.grace import GracePeriod
from slimectl.runtime.stall_cause import StallReport
from slimectl.runtime.stall_guard import Guard
from slimectl.settings import Settings
from slimectl.system import stdio
from slimectl.system.liveness import expose, own_stacks, progress_count
from slimectl.system.processes import ProcessView, descendants, kill_processes, look_at
from slimectl.system.shared_memory import remove_blocks_of
from slimectl.system.stdio import logger

LOOK_S = 5.0
"""Maximum seconds between looks."""
LOOKS = 10
"""Minimum number of looks before a run counts as stalled."""
IO_BYTES = 1 << 20
"""Bytes that a process reads or writes between two looks if it loads a model or writes a checkpoint."""
CPU_SHARE = 0.1
"""Share of a core that a process uses if it works."""
BUSY_RATE = 0.25
"""Rate at which time counts while a process of slimectl works but does not note any progress."""
END_S = 30.0
"""Seconds without progress that the run gets to save and to end after a stall."""
OWN_NAME = "the run's own process"
SERVER = "SLIMECTL_PARENT"
"""Environment variable of servers and their processes. They use the CPU while they wait."""


class StallWatch:
    """Ends the run after `run.stall_timeout` seconds without progress. A context manager, which ends its thread.

    Progress is any of: a call of liveness.note_progress in a process of the run, IO_BYTES read or written by one, and
    CPU time of programs that are not slimectl's own, such as compilers. Time in which this process was stopped does not
    count. Time in which slimectl's own processes compute counts by BUSY_RATE, because it may be an endless loop or a
    long import. Ranks compute while they wait for a GPU, so this holds for them only until `is_starting` is false.
    After a stall of a run in the main thread, `error` is set and the thread gets a SIGINT. If the run does not end then
    and `may_exit` is true, everything that it started is killed, and this process exits. A guard process does the same
    if no thread of this process can run (stall_guard.py). In any other thread, a stall is only logged.
    """

    def __init__(
        self, settings: Settings, folder: Path, resume_command: str, grace: GracePeriod, *, may_exit: bool
    ) -> None:
        self.error: StalledError | None = None
        self.processes: ProcessLister | None = None
        """Lists processes of the run that this process did not start."""
        self.is_starting = True
        self._settings, self._folder, self._resume_command = settings, folder, resume_command
        self._grace, self._may_exit = grace, may_exit
        self._ended = threading.Event()
        self._is_paused = False
        self._thread = threading.current_thread()
        self._own_count = progress_count()
        self._views: dict[tuple[str, int], ProcessView] | None = None
        self._guard: Guard | None = None
        self._children: list[ProcessView] = []
        """Processes of the run when it stalled."""

    def __enter__(self) -> StallWatch:
        return self

    def start(self) -> None:
        """Start to watch, once the run's folder exists."""
        timeout_s = self._settings.run.stall_timeout
        if timeout_s is None:
            return
        if self._may_exit:
            expose(OWN_NAME)
            self._own_count = progress_count()
        threading.Thread(target=self._watch, args=(timeout_s,), name="stall watch", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._may_exit and self.error is not None:
            self._kill_children()
        elif self._guard is not None:
            self._guard.end()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no time in the block, in which the caller works and not the run."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _watch(self, timeout_s: float) -> None:
        while True:
            self._wait_for_silence(timeout_s, self._ended)
            if self._ended.is_set():
                return
            message = self._name_cause()
            if self._thread is threading.main_thread():  # which handles signals
                break
        self.error = StalledError(message)
        self._grace.break_off()
        signal.pthread_kill(self._thread.ident or 0, signal.SIGINT)
        if self._may_exit:
            self._wait_for_silence(END_S, threading.Event())
            self._exit()

    def _wait_for_silence(self, limit_s: float, ended: threading.Event) -> None:
        """Return when there was no progress for `limit_s` seconds, or when the run has ended."""
        look_s = min(LOOK_S, limit_s / LOOKS)
        silent_s, last = 0.0, time.monotonic()
        while silent_s < limit_s:
            if ended.wait(look_s):
                return
            if self._may_exit:
                self._reassure_guard()
            now = time.monotonic()
            # A process that was stopped, or a machine that slept, has missed looks.
            elapsed_s, last = min(now - last, 2 * look_s), now
            rate = self._silence(look_s)
            silent_s = 0.0 if self._is_paused or not rate else silent_s + rate * elapsed_s

    def _reassure_guard(self) -> None:
        """Tell the guard that threads of this process run. It is started now, because many runs end before."""
        if self._guard is None:
            self._guard = Guard(StallReport.of(self._settings, self._folder, self._resume_command))
        self._guard.reassure()

    def _silence(self, look_s: float) -> float:
        """Return the rate at which the time since the last look counts as silence: 0 after any progress."""
        count, previous_count = progress_count(), self._own_count
        self._own_count = count
        if count != previous_count:
            return 0.0
        # The count of this process is read above.
        this_process = [replace(view, name=OWN_NAME, progress=0) for view in look_at([os.getpid()])]
        views = this_process + self._look()
        earlier, self._views = self._views, {(view.machine, view.pid): view for view in views}
        if earlier is None:
            return 1.0
        return min((self._rate(earlier.get(key), view, look_s) for key, view in self._views.items()), default=1.0)

    def _rate(self, before: ProcessView | None, now: ProcessView, look_s: float) -> float:
        """Return 0 if a process has made progress since the last look, BUSY_RATE if it only used the CPU, else 1."""
        is_ray = not now.name and "ray" in now.command.split("/") and "default_worker" not in now.command
        if SERVER in now.variables or (is_ray and not self.is_starting):
            return 1.0  # servers and the daemons of Ray use the CPU while they wait
        progress, io_bytes, cpu_s = (before.progress, before.io_bytes, before.cpu_s) if before else (0, 0, 0.0)
        if now.progress != progress or now.io_bytes - io_bytes >= IO_BYTES:
            return 0.0
        if now.cpu_s - cpu_s < CPU_SHARE * look_s or (now.name.startswith("rank ") and not self.is_starting):
            return 1.0
        return BUSY_RATE if now.name else 0.0

    def _look(self, *, stacks: bool = False) -> list[ProcessView]:
        """Look at the processes of the run, except this one."""
        views = look_at(descendants(os.getpid()), stacks=stacks)
        if self.processes is not None:
            local_pids = {view.pid for view in views}
            with suppress(Exception):  # a cluster that does not answer makes no progress
                listed = self.processes.list_processes(stacks=stacks)
                views += [view for view in listed if view.machine or view.pid not in local_pids]
        return views

    def _name_cause(self) -> str:
        """Write the stacks of all processes into the run's folder. Log the cause, and return the message with it."""
        stall = StallReport.of(self._settings, self._folder, self._resume_command)
        [view] = look_at([os.getpid()]) or [ProcessView(os.getpid(), 0, "slimectl", "", 0.0, 0)]
        self._children = self._look(stacks=True)
        message = stall.write(replace(view, name=OWN_NAME, stacks=own_stacks()), self._children)
        logger.warning(stall.summary)
        return message

    def _kill_children(self) -> None:
        killed = kill_processes(os.getpid(), self._children)
        remove_blocks_of({*killed, os.getpid()})

    def _exit(self) -> None:
        """End this process and everything that the run started."""
        assert self.error is not None
        if not self._ended.is_set():  # the command has not printed the error
            stdio.draw_below("")
            stdio.say(f"slimectl: {self.error}")
        self._kill_children()
        os._exit(self.error.exit_code)
