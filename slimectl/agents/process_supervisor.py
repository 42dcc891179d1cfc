"""Supervising process of an agent on Linux. Descendants of the program whose parents end become its children.

So it can end all of them, in any session and environment, when the program ends, on SIGTERM, and when its own parent
ends. process.py starts it without the imports of slimectl's packages. It exits with the program's status.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import suppress

from slimectl.sandbox.namespaces import adopt_orphans, kill_with_parent
from slimectl.sandbox.processes import ProcessTree

TICK_S = 0.5
"""Seconds between checks of the clock. Signals are handled at once."""
AWAITED = (signal.SIGTERM, signal.SIGCHLD)


def supervise(parent: int, grace_s: float, argv: list[str]) -> None:
    """Run a program, kill what it leaves, and exit with its status. On SIGTERM it gets `grace_s` seconds to end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    adopt_orphans()
    kill_with_parent(parent, signal.SIGTERM)
    tree = ProcessTree(os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    supervisor = os.getpid()
    program = os.fork()
    if program == 0:
        _execute(supervisor, argv)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):  # only the program keeps them, so that they close when it ends
        os.dup2(null, fd)
    status = _wait(program, grace_s)
    with suppress(PermissionError):  # another user's process, such as sudo
        tree.kill_all(isolated=False)
    _end_as(status)


def _execute(supervisor: int, argv: list[str]) -> None:
    """Become the program, in its own session."""
    try:
        os.setsid()
        kill_with_parent(supervisor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(ignored, signal.SIG_DFL)
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def _wait(program: int, grace_s: float) -> int:
    """Return the wait status of the program. If it outlives SIGTERM for too long, kill it."""
    deadline = float("inf")
    while time.monotonic() < deadline:
        got = signal.sigtimedwait(AWAITED, TICK_S)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                return ended[1]
        if got is not None and got.si_signo == signal.SIGTERM and deadline == float("inf"):
            deadline = time.monotonic() + grace_s
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(program, signal.SIGTERM)
    return int(signal.SIGKILL)


def _end_as(status: int) -> None:
    """End this process with the wait status of another one."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL cannot be set
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code)


def start_from(arguments: list[str]) -> None:
    """Run `supervise` with these arguments: parent, grace seconds, program."""
    parent, grace_s, *argv = arguments
    supervise(int(parent), float(grace_s), argv)
