"""Explains why an actor died, reads its log, and kills actors."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimectl.executors.child_processes import tail
from slimectl.executors.ray.cluster import ActorLocation, ray
from slimectl.system.processes import STACK_S, ProcessView, descendants, look_at

LOOK_S = 1.0
"""Seconds to wait for a machine to answer."""
LEAVE_S = 5.0
"""Seconds to wait for killed processes to end."""


def death_reason(error: BaseException | None, location: ActorLocation) -> str:
    """Return why an actor died, from the exception that Ray raised and the state of its machine."""
    if not is_alive(location.node):
        return "its machine has left the cluster"
    if isinstance(error, ray.exceptions.OutOfMemoryError) or "running low on memory" in str(error):
        return "out of memory"
    return "killed; out of memory?" if isinstance(error, ray.exceptions.RayError) else "its process ended"


def is_alive(node: str) -> bool:
    """Whether a machine belongs to the cluster and its raylet accepts connections.

    Ray itself takes up to 15 s to find out, and our processes may outlive a dead raylet. A machine that does not answer
    at all may only be busy, so that decision is left to Ray.
    """
    for entry in ray.nodes():
        if entry["NodeID"] == node and entry["Alive"]:
            try:
                address = entry["NodeManagerAddress"], entry["NodeManagerPort"]
                socket.create_connection(address, timeout=LOOK_S).close()
            except ConnectionRefusedError:
                return False
            except OSError:
                pass
            return True
    return False


def wait_for_news(limit_s: float) -> None:
    """Wait until Ray knows of every lost machine, at most `limit_s`. Until then it would place actors there."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        alive_nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        if all(map(is_alive, alive_nodes)):
            return
        time.sleep(0.5)


def tail_at(log: Path | None, location: ActorLocation) -> str:
    """Return the last lines of a log on this machine, or on the one where it was written."""
    if log is None:
        return ""
    if log.exists():
        return tail(log)
    if location.address == ray.util.get_node_ip_address() or not is_alive(location.node):
        return ""
    pinned = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(location.node, soft=False)
    reference = ray.remote(tail).options(num_cpus=0, max_retries=0, scheduling_strategy=pinned).remote(log)
    try:
        return str(ray.get(reference, timeout=LOOK_S + LEAVE_S))
    except ray.exceptions.RayError:
        return ""


def processes_at(node: str, address: str, pids: list[int], *, stacks: bool) -> list[ProcessView]:
    """Look at processes, and at what they started, on this machine or on another one of the cluster."""
    if address == ray.util.get_node_ip_address():
        return look_at_all(pids, stacks)
    if not is_alive(node):
        return []
    pinned = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    remote: Any = ray.remote(look_at_all)
    look = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=pinned)
    views = ray.get(look.remote(pids, stacks), timeout=LOOK_S + STACK_S * (1 + len(pids)))
    return [replace(view, machine=address) for view in views]


def look_at_all(pids: list[int], stacks: bool) -> list[ProcessView]:
    return look_at([each for pid in pids for each in (pid, *descendants(pid))], stacks=stacks)


def kill(actors: list[Any], places: list[ActorLocation]) -> None:
    """Kill actors at once. When this returns, the actors on this machine have ended."""
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor)
    address = ray.util.get_node_ip_address()
    pids = [place.pid for place in places if place.address == address]
    deadline = time.monotonic() + LEAVE_S
    while any(map(_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in filter(_exists, pids):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
