"""Start children of tests, and of forked commands, by forking a process that has imported torch and transformers.

Workers of pools, the fork server of ranks and `slimectl serve` otherwise begin as interpreters of their own, which
import the same modules for seconds. What begins here is a child of whoever asks, with the descriptors, environment,
folder, signals, limits and command line of the interpreter in whose place it is.

This file is both ends: `install` lets a process start its children so; `serve` is the process that forks them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import json
import multiprocessing.util
import os
import random
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
PRELOADED = "TEST_PRELOADED_SERVER"
"""Environment variable of a server that is to be forked from a process in its own Python that has imported it."""
FORKED = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")
"""Beginnings of the programs that multiprocessing starts, and that import much."""


# --- the process whose children they are ------------------------------------------------------------------------------


class Zygote:
    """The process that forks children for this one."""

    _lock = threading.Lock()
    """One for all: who adopts orphans is a property of the process."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._owner = os.getpid()

    def start(
        self,
        arguments: Sequence[str],
        descriptors: Mapping[int, int],
        env: Mapping[str, str],
        *,
        session: bool = False,
        mortal: bool = False,
    ) -> int | None:
        """Start `python ARGUMENTS`, and return its process id; None if this process has no zygote any more.

        `descriptors` are those of this process, by their numbers in the child. A `mortal` child dies with this process.
        """
        if os.getpid() != self._owner:
            return None
        request = describe(arguments, descriptors, env, session=session, mortal=mortal)
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans below become children of this process
            try:
                control = self._connect()
                socket.send_fds(control, [request], [*descriptors.values()])
                reply = control.recv(64)
            except OSError:
                return None
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int(reply) if reply else None


def describe(
    arguments: Sequence[str],
    descriptors: Mapping[int, int],
    env: Mapping[str, str],
    *,
    session: bool = False,
    mortal: bool = False,
) -> bytes:
    """Return the request for `python ARGUMENTS` with all that it would inherit from this process."""
    request = {
        "arguments": [*arguments],
        "targets": [*descriptors],
        "env": dict(env),
        "cwd": os.getcwd(),
        "session": session,
        "mortal": os.getpid() if mortal else None,
        "ignored": [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN],
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "limits": [(number, *resource.getrlimit(number)) for number in LIMITS],
    }
    return json.dumps(request).encode()


class Child:
    """A server or a run that was forked, driven as subprocess.Popen is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["slimectl"], timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def install(connect: Callable[[], socket.socket], only_servers: Callable[[], bool] = lambda: False) -> None:
    """Start workers of pools, fork servers of ranks, servers and runs of a sweep by the zygote of `connect()`."""
    from slimectl.engines.supervisor import server_process
    from slimectl.executors import commands

    zygote, spawn = Zygote(connect), multiprocessing.util.spawnv_passfds
    starting = threading.Lock()

    def spawn_forked(path: Any, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        pid, words = None, [os.fsdecode(word) for word in arguments]
        if any(word.startswith(FORKED) for word in words) and not only_servers():
            numbers = {number: number for number in (0, 1, 2, *map(int, descriptors))}
            pid = zygote.start(words[words.index("-c") :], numbers, os.environ)
        return spawn(path, arguments, descriptors) if pid is None else pid  # type: ignore[arg-type]

    def start_server(command: Sequence[str], *, stdout: Any, env: Mapping[str, str], **options: Any) -> Any:
        forking = zygote if command[:3] == [sys.executable, "-m", "slimectl"] else None
        if PRELOADED in env:
            with starting:  # of threads that start servers together, one starts that process
                forking = preloaded(command[0], command[2])
        if forking is not None:
            with open(os.devnull, "rb") as nothing:
                streams = {0: nothing.fileno(), 1: stdout.fileno(), 2: stdout.fileno()}
                pid = forking.start(command[1:], streams, env, session=True)
            if pid is not None:
                return Child(pid)
        return subprocess.Popen(command, stdout=stdout, env=env, **options)

    start_whole = commands.start_command

    def start_command(command: Sequence[str], environment: Mapping[str, str], log: Any) -> Any:
        if command[:3] != [sys.executable, "-m", "slimectl"]:
            return start_whole(command, environment, log)
        with open(os.devnull, "rb") as nothing, log.open("ab") as output:
            streams = {0: nothing.fileno(), 1: output.fileno(), 2: output.fileno()}
            pid = zygote.start(command[1:], streams, environment, session=True, mortal=True)
        return start_whole(command, environment, log) if pid is None else Child(pid)

    multiprocessing.util.spawnv_passfds = spawn_forked
    commands.start_command = start_command
    server_process.subprocess = SimpleNamespace(Popen=start_server, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


@functools.cache
def preloaded(python: str, script: str) -> Zygote:
    """Return the process that forks servers of a bootstrap script of SGLang; it begins with the first of them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [python, "-E", __file__, script, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return Zygote(lambda: ours)


# --- the process that forks -------------------------------------------------------------------------------------------


def detach() -> None:
    """Keep no stream of the process that started this one, and ignore the signals to all processes of a command."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with open(os.devnull, "r+b") as nothing:
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)


def listen(listener: socket.socket, control: socket.socket) -> NoReturn:
    """Fork a process for every connection to `listener` until `control` ends; it stays a child of this process.

    Each has a process that forks servers for it.
    """
    detach()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes children that have ended
    while listener in select.select([listener, control], [], [])[0]:
        connection = listener.accept()[0]
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 64)
        if message and (pid := os.fork()) == 0:
            for held in (listener, control, connection):
                held.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            request: dict[str, Any] = json.loads(message)
            fork_children(descriptors)
            take_over(request, dict(zip(request["targets"], descriptors, strict=True)))
            become(request["arguments"])
        for descriptor in descriptors:
            os.close(descriptor)
        with connection, contextlib.suppress(BrokenPipeError):
            connection.send(str(pid).encode())
    os._exit(0)


def fork_children(descriptors: Sequence[int] = ()) -> None:
    """Fork a process that forks the children of this one; it does not keep `descriptors`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for descriptor in (ours.detach(), *descriptors):
            os.close(descriptor)
        serve(theirs)
    theirs.close()
    install(lambda: ours)


def serve(control: socket.socket, launch: Callable[[Sequence[str]], Any] | None = None) -> NoReturn:
    """Fork a process for every request, which becomes what it names, until the connection ends."""
    detach()
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 64)
        except ConnectionResetError:
            message = b""
        if not message:
            os._exit(0)
        # Twice, so that the process becomes an orphan, and thereby a child of the one that asks.
        pid_read, pid_write = os.pipe()
        begin_read, begin_write = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(pid_write, str(pid).encode())
                os._exit(0)
            for descriptor in (control.detach(), pid_read, pid_write, begin_write):
                os.close(descriptor)
            os.read(begin_read, 1)  # ends when the process between has ended
            os.close(begin_read)
            request: dict[str, Any] = json.loads(message)
            take_over(request, dict(zip(request["targets"], descriptors, strict=True)))
            (launch or become)(request["arguments"])
        for descriptor in (begin_read, pid_write, *descriptors):
            os.close(descriptor)
        os.waitpid(between, 0)
        os.close(begin_write)
        with contextlib.suppress(BrokenPipeError):
            control.send(os.read(pid_read, 64))
        os.close(pid_read)


def take_over(request: dict[str, Any], descriptors: dict[int, int]) -> None:
    """Give this process all that an interpreter would have inherited, and its command line."""
    above = max(*descriptors, *descriptors.values()) + 1
    moved = {target: fcntl.fcntl(number, fcntl.F_DUPFD, above) for target, number in descriptors.items()}
    for number in descriptors.values():
        os.close(number)
    for target, number in moved.items():
        os.dup2(number, target)
        os.close(number)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    for number, soft, hard in request["limits"]:
        resource.setrlimit(number, (soft, hard))
    if request["session"]:
        os.setsid()
    if request["mortal"]:  # as start_command of executors/commands.py prepares a run
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != request["mortal"]:
            os._exit(1)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    write_command_line([sys.executable, *request["arguments"]])


def become(arguments: Sequence[str]) -> NoReturn:
    """Become `python ARGUMENTS`, which begin with -m MODULE or -c CODE, and exit."""
    option, program, *rest = arguments
    random.seed()
    sys.argv = ["slimectl" if option == "-m" else "-c", *rest]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [os.getcwd(), *paths]  # as `python -m` and `python -c` have it
    if option == "-m":
        run_to_exit(lambda: runpy.run_module(program, run_name="__main__", alter_sys=True))
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    run_to_exit(lambda: exec(compile(program, "<string>", "exec"), main.__dict__))


def run_to_exit(program: Callable[[], object]) -> NoReturn:
    """Run a program and exit with its code, as an interpreter does."""
    code = 1
    try:
        program()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    # What an interpreter does at its end, but for freeing every object: that would copy all of the server's memory.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def serve_preloaded(script: str, control: socket.socket) -> NoReturn:
    """Import what a bootstrap script of SGLang imports, and fork a server for every request."""
    gc.disable()
    sys.path[0] = os.path.dirname(script)
    names = runpy.run_path(script, run_name="preloaded")
    from parent_watch import leave_with_parent  # type: ignore[import-not-found]
    from sglang import launch_server
    from sglang.srt.entrypoints import http_server  # noqa: F401

    assert launch_server
    gc.freeze()

    def launch(words: Sequence[str]) -> None:
        tempfile.tempdir = None  # its own is in its environment
        random.seed()
        sys.argv = [*words[1:]]
        names["hidden_keys"].mask_logs()
        leave_with_parent()
        run_to_exit(names["serve"])

    serve(control, launch)


def write_command_line(words: Sequence[str]) -> None:
    """Let `ps` show a command line, in place of the old one and the old environment; it is cut where that is full."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[48])  # arg_start and env_end of proc(5)
    # The kernel looks for an end of the new text behind the old one only where that has no zero any more.
    text = " ".join(words).encode().ljust(int(fields[46]) - start)[: end - start - 1]
    ctypes.memmove(start, text + bytes(end - start - len(text)), end - start)


if __name__ == "__main__":
    serve_preloaded(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
