"""Shell in the jail. Commands run one after another, and their files stay until the shell is closed.

`main` runs in the jail's own process, like `main` of jail.py, and `Shell` starts it. A command is confined like a
program of runner.py: namespaces without a network, an unprivileged user, limits, and the system-call filter. Processes
that a command leaves behind end with it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimectl.sandbox.jail import fork_supervisor, isolate, supervisor_of
from slimectl.sandbox.namespaces import kill_with_parent
from slimectl.sandbox.privileges import confine
from slimectl.sandbox.processes import clear_folder
from slimectl.sandbox.program import start, write_all
from slimectl.sandbox.seccomp import call_filter
from slimectl.sandbox.supervisor import Clock, Supervisor, reap

START = (
    "import sys, types; package = types.ModuleType('slimectl'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['slimectl'] = package; from slimectl.sandbox.shell import start_from; start_from(int(sys.argv[2]))"
)

REAP_S = 1.0
"""Seconds to wait for a shell to exit after it has ended or closed its output."""


@dataclass(frozen=True)
class Result:
    """Result of a command: "ended", "exit code N", a signal's name or a limit, and its stdout and stderr together."""

    status: str
    output: str


def start_from(parent: int) -> None:
    """Run `main`, and report an OSError as a refusal."""
    try:
        main(parent)
    except OSError as error:
        write_all(1, json.dumps({"refused": str(error.strerror or error)}).encode() + b"\n")
        os._exit(1)


def main(parent: int) -> None:
    """Enter the jail of the job on stdin, and run the commands that follow it, one per line."""
    job = json.loads(sys.stdin.readline())
    kill_with_parent(parent)
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    isolate(job, judged=False)
    os.waitpid(fork_supervisor(job, lambda: _serve(supervisor_of(job, proc))), 0)


def _serve(supervisor: Supervisor) -> None:
    write_all(1, b'{"ready": true}\n')
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _ACTIONS[request["action"]](supervisor, request)
        except OSError as error:
            answer = {"error": f"{request.get('path', '')}: {error.strerror}"}
        write_all(1, json.dumps(answer).encode() + b"\n")


def _run(supervisor: Supervisor, request: dict[str, Any]) -> dict[str, str]:
    """Run a command with bash, and kill the processes that it leaves running."""
    output, write = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    job = supervisor.job | {"test_timeout_s": request["seconds"]}

    def execute() -> None:
        confine(job)
        os.chdir(request["folder"])
        os.execve("/bin/bash", ["bash", "-c", request["command"]], request["environment"])

    # A command may wait for others, so its limit is wall-clock time.
    clock = Clock(supervisor.tree, math.inf, request["seconds"])
    child = os.fork()
    if child == 0:
        start(execute, null, write, write)
    os.close(null)
    os.close(write)
    ended = os.pidfd_open(child)  # it may end before its children, which keep its output open
    texts, status = supervisor.watch({output: "output"}, clock, ended)
    if status in ("ended", "judged"):
        status = reap(child, Clock(supervisor.tree, math.inf, REAP_S))
    supervisor.end_case()
    os.set_blocking(output, False)
    with contextlib.suppress(BlockingIOError):
        texts["output"] += os.read(output, supervisor.job["max_output"])
    for fd in (ended, output):
        os.close(fd)
    return {"status": status, "output": texts["output"].decode(errors="replace")}


def _write(supervisor: Supervisor, request: dict[str, Any]) -> dict[str, str]:
    """Write a file without following a link of the program."""
    path = request["path"]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, request["mode"])
    try:
        write_all(file, base64.b64decode(request["content"]))
        os.fchmod(file, request["mode"])
    finally:
        os.close(file)
    return {}


def _read(supervisor: Supervisor, request: dict[str, Any]) -> dict[str, str]:
    """Return the beginning of a regular file, or nothing for any other."""
    try:
        file = os.open(request["path"], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}
    try:
        return {"content": base64.b64encode(os.read(file, request["size"])).decode()}
    finally:
        os.close(file)


def _clear(supervisor: Supervisor, request: dict[str, Any]) -> dict[str, str]:
    """Empty a folder, or create it if it does not exist."""
    os.makedirs(request["path"], exist_ok=True)
    clear_folder(request["path"])
    return {}


_ACTIONS = {"run": _run, "write": _write, "read": _read, "clear": _clear}


class Shell:
    """A jail with its own folders, in which commands run until it is closed. Raises OSError without a sandbox."""

    def __init__(self, folders: Sequence[str], limits: Any) -> None:
        """`folders` are empty, writable top-level folders. `limits` (runner.Limits) apply to each command."""
        from slimectl.sandbox.runner import readable_paths

        self._home = tempfile.TemporaryDirectory(prefix="slimectl-shell-")
        job = {"isolated": True, "home": os.path.realpath(self._home.name), "readable": readable_paths(),
               "folders": list(folders), "filter": call_filter().hex(), "cases": [], **asdict(limits)}  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-c", START, str(Path(__file__).parent.parent), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self._ask(job)
        except OSError:
            self.close()
            raise

    def run(self, command: str, *, folder: str, environment: Mapping[str, str], seconds: float) -> Result:
        """Run a command with bash until it ends or its time is up."""
        request = {"command": command, "folder": folder, "environment": dict(environment), "seconds": seconds}
        return Result(**self._ask({"action": "run", **request}))

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file and create its folders. Raises OSError."""
        self._ask({"action": "write", "path": path, "content": base64.b64encode(content).decode(), "mode": mode})

    def read(self, path: str, size: int = 1 << 16) -> bytes | None:
        """Return the beginning of a file, or None if it does not exist. Raises OSError."""
        content = self._ask({"action": "read", "path": path, "size": size}).get("content")
        return None if content is None else base64.b64decode(content)

    def clear(self, path: str) -> None:
        """Create or empty a folder. Raises OSError."""
        self._ask({"action": "clear", "path": path})

    def close(self) -> None:
        """End the jail and everything that runs in it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._home.cleanup()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        answer: dict[str, Any] = json.loads(line) if line else {"refused": "the shell has ended"}
        if problem := answer.get("refused") or answer.get("error"):
            raise OSError(f"the sandbox: {problem}")
        return answer
