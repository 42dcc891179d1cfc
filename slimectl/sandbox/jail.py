"""Isolated process that runs untrusted programs. runner.py starts it, without slimectl's dependencies.

The launcher enters new namespaces, isolates the file system and waits. Its child, the supervisor, is the first process
of a process namespace. It forks once for every case, and has the program and its inputs. If there are statements to
judge, a second supervisor has only the statements, and forks a judge for every case. Expected outputs never get in
here: the caller compares them. The job arrives as JSON on stdin, and statements arrive over a separate pipe. Results go
to stdout, one JSON line per case, and verdicts go to a third pipe. So the process that a program is forked from has
never held a statement.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from slimectl.sandbox.namespaces import (
    NOBODY,
    adopt_orphans,
    enter_namespaces,
    enter_pid_namespace,
    isolate_filesystem,
    kill_with_parent,
)
from slimectl.sandbox.privileges import check_confinement, drop_privileges, set_dumpable, unprivileged_uid
from slimectl.sandbox.processes import ProcessTree
from slimectl.sandbox.program import play, start, write_all
from slimectl.sandbox.supervisor import Supervisor

if TYPE_CHECKING:
    import socket

SPARE_PROCESSES = 256
"""Room for new processes of the same user, where the kernel's limit counts all processes of a user."""


def main(parent: int, tests_fd: int, verdicts_fd: int) -> None:
    """Run the job on stdin. Statements are read from `tests_fd`, which is -1 if there are none."""
    job = json.load(sys.stdin)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    kill_with_parent(parent)
    if os.getuid() == 0:
        # So the supervisor measures in time even if the measured processes are busy. Those are reset to 0.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -10)
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    judged = tests_fd >= 0
    if judged:
        import slimectl.sandbox.judge  # noqa: F401  (before its file is out of reach)
        from slimectl.sandbox.program_server import serve

        for case in job["cases"]:
            case["serve"] = serve
    isolate(job, judged=judged)
    judges, supervisor_end = 0, None
    if judged:
        import socket

        supervisor_end, judges_end = socket.socketpair()
        judges = fork_supervisor(job, lambda: _run_judges(job, proc, judges_end, tests_fd, verdicts_fd))
        judges_end.close()
        os.close(tests_fd)
        os.close(verdicts_fd)
    status = os.waitpid(fork_supervisor(job, lambda: _run_programs(job, proc, supervisor_end)), 0)[1]
    if judges:
        os.kill(judges, signal.SIGTERM)
        os.waitpid(judges, 0)
    sys.exit(bool(status))


def isolate(job: dict[str, Any], *, judged: bool) -> None:
    """Enter namespaces, or without them check that everything else that confines a program is available."""
    if job["isolated"]:
        enter_namespaces()
        job["uid"] = unprivileged_uid()
        job["writable"] = ["/tmp", "/dev/shm", *job.get("folders", ())]
        isolate_filesystem(job["home"], job["readable"], job["disk_mib"], job["writable"])
        # Supervisors and judge, and also the launchers where all have the same user.
        job["other_processes"] = (1 + 2 * judged) if job["uid"] is not None else (3 + 3 * judged)
        if os.getuid() == 0:
            check_confinement(job)
        return
    job["uid"] = unprivileged_uid()
    job["writable"] = [job["home"]]
    job["other_processes"] = int(judged)
    if job["uid"] is None or job["uid"] == NOBODY:
        job["other_processes"] += _count_tasks(job["uid"] or os.getuid()) + SPARE_PROCESSES
    if job["uid"] is not None:
        os.chown(job["home"], job["uid"], job["uid"])
    check_confinement(job)
    os.chdir(job["home"])


def _count_tasks(uid: int) -> int:
    """Return the number of processes and threads of a user on this machine."""
    count = 0
    for process in os.listdir("/proc"):
        try:
            if process.isdigit() and os.stat(f"/proc/{process}").st_uid == uid:
                count += len(os.listdir(f"/proc/{process}/task"))
        except OSError:
            continue
    return count


def fork_supervisor(job: dict[str, Any], action: Callable[[], None]) -> int:
    """Start a supervisor, in its own process namespace if there are namespaces. Return the process id to wait for."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    _end_with_errors(lambda: _supervise(job, parent, action))
    raise AssertionError("never returns")


def _supervise(job: dict[str, Any], parent: int, action: Callable[[], None]) -> None:
    if job["isolated"]:
        kill_with_parent(parent)
        parent = os.getpid()
        enter_pid_namespace()
        first = os.fork()
        if first:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) != 0)
        drop_privileges(job["uid"])
        set_dumpable(False)
        kill_with_parent(parent)
    else:
        adopt_orphans()
        kill_with_parent(parent, signal.SIGTERM)
    action()


def supervisor_of(job: dict[str, Any], proc: int) -> Supervisor:
    """Return a supervisor that, without namespaces, ends the processes that it started when it gets SIGTERM."""
    supervisor = Supervisor(job, ProcessTree(proc))
    if not job["isolated"]:

        def stop(number: int, frame: object) -> None:
            supervisor.end_case()
            os._exit(1)

        signal.signal(signal.SIGTERM, stop)
    return supervisor


def _run_programs(job: dict[str, Any], proc: int, judges: socket.socket | None) -> None:
    supervisor = supervisor_of(job, proc)
    write_all(1, b'{"ready": true}\n')
    supervisor.run_cases(lambda case: play(job, case), judges, 1)


def _run_judges(job: dict[str, Any], proc: int, control: socket.socket, tests_fd: int, verdicts_fd: int) -> None:
    """Judge each case whose number arrives over `control` with the channel to its program. Write one line per case."""
    import socket

    from slimectl.sandbox.judge import judge_case

    job["cases"], job["program"] = [], ""
    with open(tests_fd) as file:
        tests = json.load(file)
    supervisor = supervisor_of(job, proc)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 100, 1)
        if not fds:
            return
        number, seconds = json.loads(message)
        read, write = os.pipe()
        clock = supervisor.clock(seconds)
        child = os.fork()
        if child == 0:
            null = os.open(os.devnull, os.O_RDWR)
            start(partial(judge_case, job, tests[str(number)]), null, null, null, fds[0], write)
        os.close(write)
        os.close(fds[0])
        texts, status = supervisor.watch({read: "verdict"}, clock)
        supervisor.end_case()
        os.close(read)
        verdict = json.loads(texts["verdict"] or "{}") if status == "ended" else {"reason": status}
        write_all(verdicts_fd, json.dumps({"case": number, **verdict}).encode() + b"\n")
        control.send(b"done")


def _end_with_errors(action: Callable[[], None]) -> None:
    """Run an action and end this process. An OSError is written to stdout as a refusal."""
    try:
        action()
    except OSError as error:
        write_all(1, json.dumps({"refused": str(error.strerror or error)}).encode() + b"\n")
        os._exit(1)
    except SystemExit as end:
        os._exit(int(bool(end.code)))
    os._exit(0)


def start_from(arguments: list[str]) -> None:
    """Run `main` with these numbers."""
    _end_with_errors(lambda: main(*map(int, arguments)))
