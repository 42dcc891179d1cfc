"""Finds the processes of a server and their shared memory in /proc, with the standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

OWN_TMP = "slimectl-server-"
"""Prefix of a server's temporary folder."""

TRACKER = b"multiprocessing.resource_tracker"
GRACE_S = 5.0


def members(group: int) -> list[int]:
    """Return the processes of a process group, or [] without /proc."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                pids.append(int(stat.parent.name))
    return pids


def segments(pids: Iterable[int], leaves: Iterable[str]) -> set[Path]:
    """Return the files mapped by these processes whose paths contain one of `leaves`."""
    if not leaves:
        return set()
    files = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            files |= {Path(line.split()[5]) for line in lines if any(name in line for name in leaves)}
    return files


def kill_members(group: int, *, but: int | None = None) -> None:
    """Kill a group except for shared-memory trackers, which clean up and exit after the others."""
    for pid in members(group):
        with contextlib.suppress(OSError):
            if pid != but and TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def kill_group(group: int) -> None:
    """Kill a group and wait until all of its processes have ended."""
    kill_members(group)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and members(group):
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
