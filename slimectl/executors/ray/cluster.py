"""Imports Ray, connects to a cluster or starts one, and explains why it cannot."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimectl.errors import BackendError, SettingsError, requiring
from slimectl.executors.child_processes import redirect
from slimectl.system import stdio
from slimectl.system.loopback import has_room, scratch_folder

with requiring("ray", extra="ray", wanted_by='cluster.executor = "ray"'):
    import ray

__all__ = ["ray"]


FAMILIES = (
    "SLIMECTL_",
    "HF_",
    "OMP_",
    "MKL_",
    "NCCL_",
    "GLOO_",
    "TORCH",
    "TOKENIZERS_",
    "PYTORCH_",
    "NO_PROXY",
    "no_proxy",
)
"""Prefixes of environment variables that change how slimectl, or its libraries, compute and communicate."""
BELOW_BYTES = 72
"""Length of a path below Ray's temporary folder: /session_DATE_TIME_MICROSECONDS_PID/sockets/plasma_store."""


@dataclass(frozen=True)
class DriverEnvironment:
    """Import paths, working directory and environment of the driver, so that actors find the same files.

    On other machines the same paths must hold the same files, as with any checkpoint that they read.
    """

    paths: tuple[str, ...]
    folder: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def here() -> DriverEnvironment:
        """Return the environment of this process."""
        installed = tuple({sys.prefix, sys.base_prefix, sys.exec_prefix})
        paths = tuple(os.path.abspath(path) for path in sys.path if not os.path.abspath(path).startswith(installed))
        variables = {name: value for name, value in os.environ.items() if name.startswith(FAMILIES)}
        return DriverEnvironment(paths, os.getcwd(), variables)

    def enter(self, log: Path | None) -> None:
        """Apply the environment to this process, and send its output to `log` or to stderr."""
        redirect(log)
        sys.path[:0] = [path for path in self.paths if path not in sys.path]
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        if "OMP_NUM_THREADS" not in self.variables:
            # Ray sets it to the CPUs of an actor, and ours request none. torch should do as it does without Ray.
            os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(self.variables)


@dataclass(frozen=True)
class ActorLocation:
    """Machine, GPUs and process of an actor: Ray's id of the node, and the address where others reach it."""

    node: str
    address: str
    gpus: tuple[str, ...]
    pid: int

    @staticmethod
    def here() -> ActorLocation:
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ActorLocation(
            ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), tuple(gpus), os.getpid()
        )

    def __str__(self) -> str:
        return f"{self.address}, GPU {','.join(self.gpus)}" if self.gpus else self.address


REACH_S = 10.0
"""Seconds for which an address is tried where nothing listens."""
TRY_S = 20.0
"""Seconds that a listening address gets to answer as a Ray cluster."""
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

    If a cluster was started, the folder of its files is returned, for `disconnect`. A process that is already
    connected keeps its connection. Raises BackendError, in one line and within about 15 s, without a cluster or if it
    runs another version of Ray.
    """
    if ray.is_initialized():
        return None
    if address is not None:
        _check_reachable(address)
        _check_is_ray_head(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _print_on_stderr()
    options: dict[str, Any] = {"logging_level": "ERROR", "namespace": "slimectl"}
    folder: str | None = None
    if address is None:
        if "RAY_TMPDIR" not in os.environ and not has_room(os.environ.get("TMPDIR", ""), len("/ray") + BELOW_BYTES):
            options["_temp_dir"] = folder = str(scratch_folder("ray-", below_bytes=BELOW_BYTES))
        options |= {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        # "local", because None would follow RAY_ADDRESS to a cluster that the settings do not mention.
        context: Any = ray.init(address=address or OWN, **options)
    except Exception as error:
        disconnect(folder)
        raise BackendError(f"Ray at {address or 'this machine'}: {_one_line(str(error))}") from error
    finally:
        # Ray's own handler exits at once with the signal's number. The handler of a command finishes its round.
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    return (folder or context["session_dir"]) if address is None else None


def machine_addresses() -> list[str]:
    """Return the addresses of the cluster's machines."""
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def disconnect(session: str | None) -> None:
    """Leave the cluster. Stop it and remove its files if it was started here."""
    ray.shutdown()
    if session is not None:
        shutil.rmtree(session, ignore_errors=True)


def _print_on_stderr() -> None:
    """Print the output of Ray and its workers to stderr, line by line. It is not logged: these are not our messages.

    Ray 2.60 prints its own errors to the driver's stdout, where samples go. Delete this when ray.init accepts a stream.
    """
    from ray._private import worker

    worker.print_to_stdstream = _print_lines


def _print_lines(data: dict[str, Any], ignore_prefix: bool) -> None:
    pid = data.get("pid")
    if pid == "autoscaler":  # a page every five seconds
        return
    for line in filter(str.strip, data["lines"]):
        if pid == "raylet":
            # Only the first sentence of a page, because the error that follows explains what it means.
            line = f"ray: {line.strip().splitlines()[0].partition('. ')[0]}"
        elif not ignore_prefix:
            line = f"({data.get('actor_name') or data.get('task_name') or 'worker'} {pid}) {line}"
        stdio.say(line)


def check_address(address: str) -> None:
    """Raise SettingsError unless it is host:port or auto."""
    if "://" in address:
        raise SettingsError(
            f"cluster.ray_address: {address}: give host:port of the head, from a machine of the cluster"
        )
    host, _, port = address.rpartition(":")
    if address != "auto" and (not host or not port.isdigit()):
        raise SettingsError(f"cluster.ray_address: {address}: give host:port of the head, or auto")


def _check_reachable(address: str) -> None:
    """Check that something listens at the address, because Ray itself would try for minutes. Raises BackendError."""
    check_address(address)
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
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
        f"Ray at {address} is not answering ({REACH_S:g} s: {error}). Start it with `ray start --head`, or unset "
        "cluster.ray_address to start one on this machine."
    )


def _check_is_ray_head(address: str) -> None:
    """Connect in a separate process first, because without a cluster Ray tries for minutes and cannot be stopped.

    Raises BackendError.
    """
    try:
        result = subprocess.run([sys.executable, "-c", TRY, address], capture_output=True, text=True, timeout=TRY_S)
    except subprocess.TimeoutExpired as expired:
        # Ray 2.60 tries for minutes, with a line per second.
        if b"InvalidAuthToken" in (expired.stderr or b""):
            raise BackendError(
                f"Ray at {address}: its head asks for a token. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
                f"~/.ray/auth_token as on the head. Or start it with RAY_AUTH_MODE=disabled in a private network."
            ) from None
        raise BackendError(
            f"Ray at {address}: something listens there, but it did not answer as a Ray head within {TRY_S:g} s. Give "
            f"the head's own port (6379 by default), and use Ray {ray.__version__} there."
        ) from None
    if result.returncode:
        raise BackendError(f"Ray at {address}: {_one_line(result.stderr)}")


def _one_line(message: str) -> str:
    """Shorten Ray's message to one line, but keep both versions of a version mismatch."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("[")]
    if any("ersion mismatch" in line for line in lines):
        return f"{' '.join(lines)}. Install the versions of the cluster."
    return lines[-1] if lines else "cannot join the cluster"
