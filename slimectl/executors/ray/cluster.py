"""The connection to a Ray cluster: one of our own on this machine, or a running one by its address."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

from slimectl.errors import BackendError, SettingsError
from slimectl.executors.ray.library import ray

REACH_S = 10.0
"""How long an address where nobody listens is tried."""
TRY_S = 20.0
"""How long what listens there may take to be a Ray cluster."""
TRY = """
import sys, ray
try:
    ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
except BaseException as error:
    sys.exit(f"{error}")
"""
OWN = "local"


def connect(address: str | None, *, cpus: int) -> str | None:
    """Join the cluster at `address`, or start one on this machine with at least `cpus` logical CPUs.

    The folder of the session is returned if it was started, for `disconnect`. A process that is connected already
    stays so. Raises BackendError, in one line and within about 15 s, if there is no cluster or not one of this Ray.
    """
    if ray.is_initialized():
        return None
    if address is not None:
        _reach(address)
        _try(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _print_on_stderr()
    asked = {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False} if address is None else {}
    try:
        # "local", because None would follow RAY_ADDRESS to a cluster that nobody asked for.
        context = ray.init(address=address or OWN, logging_level="ERROR", namespace="slimectl", **asked)
    except Exception as error:
        raise BackendError(f"Ray at {address or 'this machine'}: {_told(str(error))}") from error
    return context["session_dir"] if address is None else None


def disconnect(session: str | None) -> None:
    """Leave the cluster; one that was started here ends, with its files."""
    ray.shutdown()
    if session is not None:
        shutil.rmtree(session, ignore_errors=True)


def _print_on_stderr() -> None:
    """What Ray and its workers say goes to stderr, a line each.

    Ray 2.60 prints its own errors on the driver's stdout, where samples go. Delete when ray.init takes a stream.
    """
    from ray._private import worker

    worker.print_to_stdstream = _print_said


def _print_said(data: dict[str, Any], ignore_prefix: bool) -> None:
    speaker = data.get("pid")
    if speaker == "autoscaler":  # a page every five seconds
        return
    for line in filter(str.strip, data["lines"]):
        if speaker == "raylet":
            # The first sentence of a page; what it means for the work is said where the work fails.
            line = f"ray: {line.strip().splitlines()[0].partition('. ')[0]}"
        elif not ignore_prefix:
            line = f"({data.get('actor_name') or data.get('task_name') or 'worker'} {speaker}) {line}"
        print(line, file=sys.stderr)


def _reach(address: str) -> None:
    """Raises BackendError if nobody listens there: Ray itself would try for minutes."""
    if address == "auto":
        return
    if "://" in address:
        raise SettingsError(
            f"cluster.ray_address: {address}: give host:port of the head, from a machine of the cluster"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise SettingsError(f"cluster.ray_address: {address}: give host:port of the head, or auto")
    deadline, error = time.monotonic() + REACH_S, None
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S / 2).close()
        except OSError as failed:
            error = failed
            time.sleep(0.5)
        else:
            return
    raise BackendError(
        f"Ray at {address} is not answering ({REACH_S:g} s: {error}); start it with `ray start --head`, or drop "
        "cluster.ray_address for one on this machine"
    )


def _try(address: str) -> None:
    """Connect in a process of its own first: where there is no Ray cluster Ray tries for minutes and cannot be stopped.

    Raises BackendError.
    """
    try:
        tried = subprocess.run([sys.executable, "-c", TRY, address], capture_output=True, text=True, timeout=TRY_S)
    except subprocess.TimeoutExpired:
        raise BackendError(
            f"Ray at {address}: something is there, but it did not answer as a Ray head does in {TRY_S:g} s; give the "
            f"head's own port (6379 by default) and Ray {ray.__version__}"
        ) from None
    if tried.returncode:
        raise BackendError(f"Ray at {address}: {_told(tried.stderr)}")


def _told(words: str) -> str:
    """Ray's words in one line; of two versions that differ, both."""
    lines = [line.strip() for line in words.splitlines() if line.strip() and not line.startswith("[")]
    if any("ersion mismatch" in line for line in lines):
        return f"{' '.join(lines)}; install the versions of the cluster"
    return lines[-1] if lines else "it could not be joined"
