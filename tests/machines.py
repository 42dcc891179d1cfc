"""One Ray cluster for all tests of a session: a head on which nothing is placed, and two machines of four GPUs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import forkserver
import psutil
import ray_worker

CONFIG = {
    "RAY_memory_monitor_refresh_ms": "0",  # off: how full this machine is, is not what is tested
    # A lost machine refuses each check at once, and is given up after five; a busy one still gets 10 s for each.
    "RAY_health_check_period_ms": "200",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_worker_niceness": "0",  # as all other processes: at 15 a worker waits for every test that runs beside it
}
STORE = {"object_store_memory": 80_000_000, "include_log_monitor": False}
"""What workers print reaches a driver in tests/executors/test_ray.py, on a cluster of its own: the monitor of logs
reads all files of all machines again and again."""
MACHINE = {"num_cpus": 2, "num_gpus": 4, **STORE}
COUNT = 2


_running: list[Any] = []


def shared() -> Any:
    """Return the cluster, whose machines are processes here; the first caller starts it."""
    if not _running:
        from ray._private import utils
        from ray.cluster_utils import Cluster

        # The agents of the dashboard, a process for each machine, then import a tenth.
        utils.get_dashboard_dependency_error = lambda: ImportError("nobody looks at it")
        os.environ.update(CONFIG)
        if forkserver.forks:
            os.environ[ray_worker.ADDRESS] = forkserver.ray_workers()
            for options in (STORE, MACHINE):
                options["setup_worker_path"] = ray_worker.__file__
        head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "no_monitor": True, **STORE}
        _running.append(Cluster(initialize_head=True, head_node_args=head))
        complete(_running[0])
    return _running[0]


def stop() -> None:
    """End the cluster if there is one, and remove its files."""
    while _running:
        machines = _running.pop()
        session = machines.head_node.get_session_dir_path()
        machines.shutdown()
        shutil.rmtree(session, ignore_errors=True)
        for name in (*CONFIG, ray_worker.ADDRESS):
            os.environ.pop(name, None)


def complete(machines: Any) -> None:
    """Replace the machines that a test has removed."""
    while len(machines.worker_nodes) < COUNT:
        machines.add_node(**MACHINE)


def processes(machine: Any) -> list[psutil.Process]:
    """Return the workers of a machine and their descendants; for each worker a child of its raylet waits."""
    left: list[psutil.Process] = []
    for child in psutil.Process(machine.all_processes["raylet"][0].process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            for pid in _awaited(child.pid) if forkserver.forks else [child.pid]:
                worker = psutil.Process(pid)
                left += [worker, *worker.children(recursive=True)]
    return left


def _awaited(pid: int) -> list[int]:
    """Return the processes that a process has pidfds of, by proc(5)."""
    texts = [file.read_text() for file in Path(f"/proc/{pid}/fdinfo").iterdir()]
    return [int(number) for text in texts for number in re.findall(r"^Pid:\t(\d+)$", text, re.MULTILINE)]


def is_gone(session: str) -> bool:
    """Whether no process of a cluster is left; each has the session's folder among its arguments or its open files."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_text()
            opened = " ".join(os.readlink(file) for file in (folder / "fd").iterdir())
        except OSError:
            continue
        if session in text or session in opened:
            return False
    return True
