"""Runs the cases of a job one after another, each in its own process, within limits on time, memory and output."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slimectl.sandbox.namespaces import MAX_FILES
from slimectl.sandbox.processes import ProcessTree, clear_folder
from slimectl.sandbox.program import ERROR_BYTES, start, write_all

if TYPE_CHECKING:
    import socket

CHECK_S = 0.005
"""Seconds between checks of a case's memory."""

DISK_CHECK_S = 0.05
WALL_FACTOR = 10.0
"""Wall-clock seconds for each second of CPU time, for a program that sleeps or a busy machine."""


class Clock:
    """Time of a case: the CPU seconds of its processes, with a much longer wall-clock limit.

    A program's reward must not depend on the load of the machine.
    """

    def __init__(self, tree: ProcessTree, cpu_s: float, wall_s: float) -> None:
        tree.reset_cpu()
        self._tree = tree
        self._cpu_limit_s = cpu_s
        self.deadline = time.monotonic() + wall_s

    def cpu_s(self) -> float:
        """Return the CPU seconds so far."""
        return self._tree.cpu_s()

    def has_expired(self) -> bool:
        """Return whether the time is up."""
        return time.monotonic() >= self.deadline or self.cpu_s() >= self._cpu_limit_s


@dataclass
class Supervisor:
    """Starts the processes of a case, and ends them when they exceed the limits of the job."""

    job: dict[str, Any]
    tree: ProcessTree

    def clock(self, seconds: float) -> Clock:
        """Return a clock for a case that may take `seconds` of CPU time. None of its processes may exist yet."""
        return Clock(self.tree, seconds, seconds * WALL_FACTOR)

    def watch(self, pipes: dict[int, str], clock: Clock, stop: int = -1) -> tuple[dict[str, bytes], str]:
        """Read pipes until all are closed, or `stop` has something to read, or a limit is reached.

        Returns the output of each pipe, and "ended", "judged" (for `stop`) or the limit.
        """
        texts = dict.fromkeys(pipes.values(), b"")
        next_check, next_disk_check = 0.0, 0.0
        unclosed = set(pipes)
        while unclosed:
            now = time.monotonic()
            if now >= clock.deadline:
                return texts, "out of time"
            if now >= next_check:
                if clock.has_expired():
                    return texts, "out of time"
                count_files = not self.job["isolated"] and now >= next_disk_check
                if excess := self._excess(count_files=count_files):
                    return texts, excess
                # A slow check of shared pages stops the case, so it takes at most a third of its time.
                next_check = time.monotonic() + max(CHECK_S, 2 * (time.monotonic() - now))
                next_disk_check = next_check + DISK_CHECK_S if count_files else next_disk_check
            watched = [*unclosed, stop] if stop >= 0 else list(unclosed)
            ready = select.select(watched, [], [], max(0.0, min(clock.deadline, next_check) - now))[0]
            if stop in ready:
                return texts, "judged"
            for pipe in ready:
                name, piece = pipes[pipe], os.read(pipe, 65536)
                if not piece:
                    unclosed.discard(pipe)
                texts[name] += piece
                if len(texts[name]) > self.job["max_output"]:
                    return texts, "too much output"
                if name == "stderr":
                    texts[name] = texts[name][-ERROR_BYTES:]
        return texts, "ended"

    def _excess(self, *, count_files: bool) -> str:
        """Return which limit the processes of the case exceed, or "" if none."""
        memory = self.job["memory_mib"] << 20
        usage = self.tree.usage(memory, isolated=self.job["isolated"])
        if usage.memory > memory:
            return "too much memory"
        if not self.job["isolated"] and usage.tasks > self.job["processes"]:
            return "too many processes"
        if count_files:
            self.tree.add_files(usage, self.job["home"])
            if usage.disk > self.job["disk_mib"] << 20 or usage.files > MAX_FILES:
                return "too many files"
        return ""

    def end_case(self) -> None:
        """Kill all remaining processes of the case."""
        self.tree.kill_all(isolated=self.job["isolated"])

    def run_cases(self, play: Callable[[dict[str, Any]], None], judges: socket.socket | None, out: int) -> None:
        """Run the cases one after another until their total time is used up. Write one JSON line per case."""
        remaining_s = self.job["timeout_s"]
        deadline = time.monotonic() + remaining_s * WALL_FACTOR
        for number, case in enumerate(self.job["cases"]):
            seconds = min(remaining_s, (deadline - time.monotonic()) / WALL_FACTOR, self.job["test_timeout_s"])
            if seconds < 0.01:
                return
            case["folder"] = f"{os.getcwd()}/{number}"
            clock = self.clock(seconds)
            report = self.run_test_case(number, case, seconds, clock, play, judges)
            remaining_s -= clock.cpu_s()
            for folder in self.job["writable"]:
                clear_folder(folder, self.job["readable"])  # the interpreter may live below /tmp
            write_all(out, json.dumps(report).encode() + b"\n")

    def run_test_case(
        self,
        number: int,
        case: dict[str, Any],
        seconds: float,
        clock: Clock,
        play: Callable[[dict[str, Any]], None],
        judges: socket.socket | None,
    ) -> dict[str, Any]:
        """Run one case. Return how it ended, what it printed, and what it reported over a separate pipe."""
        judged = case.get("judged") and judges is not None
        if judged:
            import socket  # takes as long as all other imports
        stdin = _sealed_file(case.get("input", "").encode("utf-8", "surrogatepass"))
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "report")}
        channel = socket.socketpair() if judged else None
        child = os.fork()
        if child == 0:
            report = channel[0].fileno() if channel else pipes["report"][1]
            start(lambda: play(case), stdin, pipes["stdout"][1], pipes["stderr"][1], report)
        os.close(stdin)
        for _, write in pipes.values():
            os.close(write)
        if channel and judges:
            socket.send_fds(judges, [json.dumps([number, seconds]).encode()], [channel[1].fileno()])
            channel[0].close()
            channel[1].close()
        stop = judges.fileno() if channel and judges else -1
        texts, status = self.watch({read: name for name, (read, _) in pipes.items()}, clock, stop)
        if status == "ended":
            status = reap(child, clock)
        status = "ended" if status == "judged" else status
        self.end_case()
        if channel and judges:
            judges.recv(16)  # its judge has ended too
        for read, _ in pipes.values():
            os.close(read)
        stdout, stderr, report_text = (texts[name].decode("utf-8", "replace") for name in texts)
        error = stderr[-ERROR_BYTES:].strip().rpartition("\n")[2]
        return {"status": status, "stdout": stdout, "error": error, "report": report_text}


def _sealed_file(text: bytes) -> int:
    """Return a read-only file in memory, which cannot be written or enlarged."""
    file = os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    write_all(file, text)
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def reap(child: int, clock: Clock) -> str:
    """Return how the child ended. If it has closed its pipes but keeps running, it may run until its time is up."""
    pause = 0.0005
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return "ended" if code == 0 else f"exit code {code}" if code > 0 else signal.Signals(-code).name
        if clock.has_expired():
            return "out of time"
        time.sleep(pause)
        pause = min(2 * pause, CHECK_S)
