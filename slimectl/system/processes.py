"""Looks at other processes of this machine in /proc: descendants, state, what they wait for, progress and stacks."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slimectl.system.liveness import DESCRIBES, OWNER, PAGE, PREFIX, PROGRESS, REQUESTED, STACK_SIGNAL

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CELL = 8
STACK_S = 2.0
"""Seconds that a process gets to write its stacks."""
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in uninterruptible sleep"}
"""States of processes that do not answer (proc(5))."""
PIPE_FULL = "writes into a full pipe"
WAITS = {
    "pipe_write": PIPE_FULL,
    "pipe_read": "reads from an empty pipe",
    "wait_for_partner": "opens a FIFO that no other process has open",
    "fifo_open": "opens a FIFO that no other process has open",
    "nanosleep": "sleeps",
    "futex": "waits for a lock or for another thread",
    "do_wait": "waits for a child process",
    "inet_csk_accept": "waits for a connection",
    "wait_woken": "waits for data from a socket or a terminal",
    "sk_wait_data": "waits for data from a socket",
    "unix_stream": "waits for data from a socket",
    "n_tty_read": "reads from a terminal",
    "flock": "waits for a file lock",
    "posix_lock": "waits for a file lock",
    "rpc_wait": "waits for a network file system",
    "fuse": "waits for a file system",
    "io_schedule": "waits for a disk",
}
"""What a process waits for, by a part of the name of the kernel function in which it sleeps."""


@dataclass(frozen=True)
class ProcessView:
    """A process at one moment. It is picklable."""

    pid: int
    parent: int
    command: str
    state: str
    cpu_s: float
    io_bytes: int
    name: str = ""
    """Name under which it exposed itself (liveness.expose), or ""."""
    progress: int = 0
    variables: frozenset[str] = frozenset()
    """Names of its environment variables that begin with SLIMECTL_."""
    waits: str = ""
    stacks: str = ""
    machine: str = ""
    """Address of its machine, if that is another one."""
    start_ticks: int = 0
    """When it started, in ticks since the machine did."""


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, directly or not. [] without /proc."""
    pids: list[int] = []
    unseen = [pid]
    while unseen:
        current = unseen.pop()
        for children in Path(f"/proc/{current}/task").glob("*/children"):
            with suppress(OSError, ValueError):
                unseen += (new := [int(child) for child in children.read_text().split()])
                pids += new
    return pids


def look_at(pids: Iterable[int], *, stacks: bool = False) -> list[ProcessView]:
    """Look at these processes, unless they have ended. With `stacks`, ask exposed ones for their stacks."""
    return [view for pid in pids if (view := _look(pid, stacks=stacks)) is not None]


def _look(pid: int, *, stacks: bool) -> ProcessView | None:
    proc = Path(f"/proc/{pid}")
    try:
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        state, parent, ticks = fields[0], int(fields[1]), int(fields[11]) + int(fields[12])
        start_ticks = int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
    if state == "Z":
        return None
    command = _text(proc / "cmdline").replace("\0", " ").strip() or f"[{_text(proc / 'comm').strip()}]"
    # Without what this process reads, because it reads these files.
    kinds = ("wchar", "read_bytes", "write_bytes", *(("rchar",) if pid != os.getpid() else ()))
    counts = (line.partition(": ")[2] for line in _text(proc / "io").splitlines() if line.startswith(kinds))
    variables = frozenset(
        entry.partition("=")[0] for entry in _text(proc / "environ").split("\0") if entry.startswith("SLIMECTL_")
    )
    name, progress, text = "", 0, ""
    if (file := _memory_file(proc)) is not None:
        fd, name = file
        try:
            owner, progress = (_cell(fd, number) for number in (OWNER, PROGRESS))
            name = name if owner == pid else f"{name} (forked)"
            if stacks and state not in STATES:
                text = _ask(pid, fd)
        finally:
            os.close(fd)
    return ProcessView(
        pid, parent, command, state, ticks / TICKS_PER_S, sum(int(count) for count in counts if count.isdigit()),
        name, progress, variables, _wait_of(proc), text, start_ticks=start_ticks,
    )  # fmt: skip


def _memory_file(proc: Path) -> tuple[int, str] | None:
    """Open the memory file of an exposed process. Return its descriptor and the name, or None."""
    with suppress(OSError):
        for link in (proc / "fd").iterdir():
            with suppress(OSError):
                target = os.readlink(link)
                if target.startswith(f"/memfd:{PREFIX}"):
                    return os.open(link, os.O_RDWR | os.O_CLOEXEC), target.removesuffix(" (deleted)")[7 + len(PREFIX) :]
    return None


def _cell(fd: int, number: int) -> int:
    return int(struct.unpack("Q", os.pread(fd, CELL, CELL * number))[0])


def _ask(pid: int, fd: int) -> str:
    """Return the stacks of a process: with detail if it describes itself, else as the interpreter writes them."""
    start = os.fstat(fd).st_size
    os.pwrite(fd, struct.pack("Q", time.monotonic_ns()), CELL * REQUESTED)
    described = bool(_cell(fd, DESCRIBES)) and _written(fd, start)
    if not described and _catches_signal(pid):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACK_SIGNAL)
            _written(fd, start)
    return os.pread(fd, 1 << 20, max(start, PAGE)).decode(errors="replace")


def _written(fd: int, start: int) -> bool:
    """Wait until a process has written its stacks. Return whether it has."""
    deadline, size = time.monotonic() + STACK_S, start
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if (now := os.fstat(fd).st_size) > start and now == size:
            return True
        size = now
    return size > start


def _catches_signal(pid: int) -> bool:
    """Return whether the signal for stacks has a handler in the process, which it would end otherwise."""
    caught = next((line for line in _text(Path(f"/proc/{pid}/status")).splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(caught.split()[-1], 16) >> (STACK_SIGNAL - 1) & 1)


def _wait_of(proc: Path) -> str:
    """Return what the main thread of a process waits for, with the pipe that it reads or writes, or ""."""
    function = _text(proc / "wchan")
    waits = next((meaning for part, meaning in WAITS.items() if part in function), "")
    if "pipe" in function:
        with suppress(OSError, ValueError, IndexError):
            descriptor = int((proc / "syscall").read_text().split()[1], 16)
            pipe = os.readlink(proc / "fd" / str(descriptor))
            readers = ", ".join(map(str, _holders(pipe, int(proc.name)))) or "none"
            waits += f" (descriptor {descriptor}, {pipe}, also open in: {readers})"
    return waits


def _holders(target: str, apart: int) -> Iterator[int]:
    """Yield the processes that have this pipe open, except one."""
    for proc in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(proc.name) != apart and any(os.readlink(link) == target for link in (proc / "fd").iterdir()):
                yield int(proc.name)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def kill_processes(root: int, earlier: Iterable[ProcessView] = ()) -> set[int]:
    """Kill everything that a process has started, except this process, and return the process ids.

    `earlier` are processes that it had started, and whose own parents may have ended. Trackers of shared memory stay,
    because they clean up and end after the others.
    """
    killed: set[int] = set()
    starts = {view.pid: view.start_ticks for view in earlier if not view.machine}
    deadline = time.monotonic() + STACK_S
    while time.monotonic() < deadline:
        views = look_at(descendants(root))
        views += [view for view in look_at(starts) if view.start_ticks == starts[view.pid]]
        views = [view for view in views if view.pid != os.getpid() and "resource_tracker" not in view.command]
        if not views:
            break
        for view in views:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(view.pid, signal.SIGKILL)
        killed |= {view.pid for view in views}
        time.sleep(0.02)
    return killed
