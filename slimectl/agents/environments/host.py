"""The process of an environment. It loads the adapter once, then forks a process for every episode.

Forks are cheap, share the memory of what was loaded, and separate what libraries keep in global state, such as the
random numbers of `random`. The host listens on a socket. Each connection is an episode, with calls and results as JSON
lines. Stdin carries the specification, then ids of processes to kill. When it closes, the host and all episodes end.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import inspect
import json
import os
import selectors
import shutil
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, NoReturn

from slimectl.agents.environments.port import Action, Environment, Task
from slimectl.errors import BackendError, SettingsError, SlimectlError
from slimectl.plugins.registry import ENVIRONMENTS
from slimectl.system.liveness import expose

PR_SET_PDEATHSIG = 1
PARENT_CHECK_S = 5.0
"""Seconds between checks that the parent process still exists."""
LINE = 1 << 26
"""Maximum number of bytes in a line."""


def main(path: str) -> NoReturn:
    """Serve episodes on a socket at `path` until stdin ends."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep an environment's output apart from results
    commands = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    specification = json.loads(_line(commands))
    expose("environment")
    try:
        environment = load(**specification)
        counts = {split: environment.count(split) for split in ("train", "eval")}
    except SlimectlError as error:
        _end(results, {"error": str(error), "class": type(error).__name__})
    except Exception as error:
        name = f"{specification['kind']}:{specification['target']}"
        _end(results, {"error": f"{name}: {one_line(error)}", "class": SettingsError.__name__})
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(4096)
    description = {"tasks": environment.tasks, "gives_reward": environment.gives_reward, "counts": counts}
    description["warnings"] = environment.warnings
    results.write(f"{json.dumps(description)}\n")
    results.close()
    _serve(listener, commands, environment)


def load(kind: str, target: str, arguments: dict[str, Any]) -> Environment:
    """Make the adapter of a kind. Raises BackendError for an unknown kind or a package that is not installed."""
    adapter = ENVIRONMENTS.load(kind)
    try:
        environment: Environment = adapter(target, arguments)
    except ModuleNotFoundError as error:
        package, extra = (ENVIRONMENTS.fact(kind, fact, kind) for fact in ("package", "extra"))
        if (error.name or "").partition(".")[0] != ENVIRONMENTS.fact(kind, "library", kind):
            raise
        raise BackendError(
            f"rollout.env = {kind}:{target} needs {package}, which {sys.executable} does not have. Run: pip install "
            f"'slimectl[{extra}]', or set rollout.env_python to a Python that has it."
        ) from None
    return environment


def one_line(error: BaseException) -> str:
    """Return an exception in one line of bounded length."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _end(results: Any, problem: dict[str, str]) -> NoReturn:
    results.write(f"{json.dumps(problem)}\n")
    results.close()
    sys.exit(1)


def _line(fd: int) -> bytes:
    """Read a line, unbuffered."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


def _serve(listener: socket.socket, commands: int, environment: Environment) -> NoReturn:
    """Fork an episode for every connection. Kill those listed on stdin, and all of them when it closes."""
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    episodes: set[int] = set()
    parent = os.getppid()
    with selectors.DefaultSelector() as selector:
        for source in (listener, commands, ended):
            selector.register(source, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select(PARENT_CHECK_S)}
            if os.getppid() != parent:  # a fork of the parent may hold its end of stdin open
                _leave(episodes, listener)
            if ended in ready:
                os.read(ended, 4096)
                _reap(episodes)
            if commands in ready:
                command = _line(commands)
                if not command:
                    _leave(episodes, listener)
                _kill(episodes & {int(command)})
            if listener in ready:
                connection, _ = listener.accept()
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    selector.close()
                    for fd in (commands, ended, wakeup):
                        os.close(fd)
                    _run_episode(connection, environment)
                connection.close()
                episodes.add(pid)


def _leave(episodes: set[int], listener: socket.socket) -> NoReturn:
    """End this process with all episodes, and remove the folder of their files."""
    _kill(episodes)
    shutil.rmtree(os.path.dirname(listener.getsockname()), ignore_errors=True)
    os._exit(0)


def _reap(episodes: set[int]) -> None:
    """Reap episodes that have ended, and kill the processes that they left running."""
    for pid in list(episodes):
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                episodes.discard(pid)
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _run_episode(connection: socket.socket, environment: Environment) -> NoReturn:
    """Serve the calls of one episode in this process, a fresh fork, then end it with all its processes."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        asyncio.run(_answer_calls(connection, environment))
    finally:
        os._exit(0)  # the host kills the rest of the process group


async def _answer_calls(connection: socket.socket, environment: Environment) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=LINE)
    writer.write(json.dumps({"pid": os.getpid()}).encode() + b"\n")
    while line := await reader.readline():
        try:
            call = json.loads(line)
            result: dict[str, Any] = {"result": await _result(environment, call["method"], call["argument"])}
        except Exception as error:
            result = {"error": one_line(error)}
        writer.write(json.dumps(result, default=str).encode() + b"\n")
        await writer.drain()


async def _result(environment: Environment, method: str, argument: dict[str, Any]) -> dict[str, Any]:
    if method == "reset":
        result: Any = environment.reset(Task(**argument))
    elif method == "step":
        result = environment.step(Action(**argument))
    else:
        result = environment.close()
    return dataclasses.asdict(await result if inspect.isawaitable(result) else result)
