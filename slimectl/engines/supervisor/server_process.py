"""A child process that serves HTTP: starts it, reads its log, and ends it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slimectl.engines.api_keys import NO_KEYS, ServerKeys
from slimectl.engines.http.request import NO_WEIGHTS
from slimectl.engines.supervisor.bootstrap.cleanup import OWN_TMP, kill_group, members, segments
from slimectl.errors import BackendError
from slimectl.system.event_loop import run_coroutine
from slimectl.system.http import get
from slimectl.system.listening import own_address
from slimectl.system.liveness import note_progress
from slimectl.system.loopback import bypass_proxies, scratch_folder
from slimectl.system.stdio import logger

TAIL_BYTES = 256 * 1024

MEMORY = re.compile(
    r"out of memory|OutOfMemory|not enough memory|MemoryError|bad_alloc|can(no|')t allocate memory|leave no GPU memory",
    re.I,
)
ERROR = re.compile(r"^(?:\[[^\]]*\]\s*)?(?:[\w.]*\.)?\w*(?:Error|Exception)\b.*:\s*\S")
NOISE = re.compile(r"warn|^\s*$|^\s*(File |\^|~)", re.I)


def tail(log: Path, lines: int, *, since: int = 0) -> str:
    """Return the last lines of a file after byte `since`, or "" if there is no file."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def error_line(text: str) -> str:
    """Return the line that explains a failure.

    This is the first line about memory, else the first error, because later ones are consequences, else the last line
    that is not a warning.
    """
    lines = text.splitlines()
    for pattern in (MEMORY, ERROR):
        match = next((line for line in lines if pattern.search(line)), None)
        if match is not None:
            return _short(match)
    return _short(next((line for line in reversed(lines) if not NOISE.search(line)), "the log is empty"))


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= 300 else line[:297] + "..."


Command = Callable[[str, int], Sequence[str]]
"""Returns the command line for a host and a port."""

PORTS_TRIED = 5
FIXED_PORTS = range(20000, 32768)
"""Below the ports that Linux assigns to outgoing connections, which could take a port before the server binds it."""

POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server of any kind: what it serves, and where it runs."""

    log: Path
    """File that the server writes to."""

    dtype: str = "float32"
    device: str = "cpu"
    max_context: int | None = None
    """Maximum tokens of prompt and response. None: the model's limit."""

    weight_version: str = NO_WEIGHTS
    """Version of the weights in the model's folder. NO_WEIGHTS if others are pushed before sampling starts."""

    host: str | None = "127.0.0.1"
    """Address to listen on. None: this machine's address."""

    start_timeout_s: float = 600.0
    keys: ServerKeys = NO_KEYS
    """Keys that requests need. They are passed through the environment."""

    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """The command of a server, and what a process of this kind needs."""

    command: Command
    env: Mapping[str, str] = field(default_factory=dict)
    ready: str = "/health"
    ports: int = 1
    """Number of consecutive ports."""

    own_tmp: bool = False
    """Whether the server gets a temporary folder that is removed with it."""

    leaves: Sequence[str] = ()
    """Parts of paths of shared memory that the server does not remove."""

    prepare: Callable[[str], None] | None = None
    """Called with the address of the ready server before `start` returns."""


class ServerProcess:
    """A child process that serves HTTP and responds to `GET {ready}` with 200 once it is ready.

    It can be pickled until `start`, and its interface consists only of methods, so that an executor can host it. The
    child has a separate session (the parent handles Ctrl-C). It exits when this process dies, which the command
    implements with SLIMECTL_PARENT.
    """

    def __init__(self, name: str, program: ServerProgram, options: ServerOptions) -> None:
        self.program, self.options = program, options
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: str | None = None
        self._segments: set[Path] = set()
        self._log_start = 0
        self._should_run = False

    def show_gpus(self, names: Sequence[str]) -> None:
        """Let the server see only these GPUs, from its next start on."""
        self.options = replace(self.options, env={**self.options.env, "CUDA_VISIBLE_DEVICES": ",".join(names)})

    def meeting_address(self) -> str:
        """Return a free address on this machine where the processes of one server can meet."""
        host = self.options.host or own_address()
        return f"[{host}]:{free_port(host)}" if ":" in host else f"{host}:{free_port(host)}"

    def start(self, arguments: Sequence[str] = ()) -> str:
        """Start the server and return its address once it is ready. `arguments` are added to the command line.

        Raises BackendError with the error line of its log.
        """
        self.stop()
        self._should_run = True
        host = self.options.host or own_address()
        started_at = time.monotonic()
        for _ in range(PORTS_TRIED):
            port = free_port(host, ports=self.program.ports)
            process = self._spawn(host, port, arguments)
            if self._wait_until_ready(process, f"http://{host}:{port}", started_at + self.options.start_timeout_s):
                if self.program.prepare is not None:
                    self.program.prepare(f"http://{host}:{port}")
                logger.debug(
                    f"{self._name} answers at http://{host}:{port} after {time.monotonic() - started_at:.1f} s"
                )
                return f"http://{host}:{port}"
            message = self._error_line()
            self.stop(again=True)
            # Search the whole log, because SGLang logs its own timeout after this error.
            if "address already in use" not in self.log_tail(2000).lower():
                break
        self.stop()
        code = process.returncode
        late = time.monotonic() - started_at >= self.options.start_timeout_s
        description = (
            f"did not respond within {self.options.start_timeout_s:.0f} s"
            if late
            else f"died while starting ({_exit_reason(code, message)})"
        )
        raise BackendError(f"{self._name} {description}: {message}. See its log: {self.options.log}")

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def pid(self) -> int | None:
        """Return the process id of the server, which is also its process group."""
        return self._process.pid if self._process is not None else None

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines that the server wrote since its last start."""
        return tail(self.options.log, lines, since=self._log_start)

    def death(self) -> str:
        """Return why it died, according to its exit code and log."""
        code = self._process.poll() if self._process is not None else None
        message = self._error_line()
        return f"{_exit_reason(code, message)}: {message}"

    def stop(self, *, again: bool = False) -> None:
        """End the server and all its children, if any. `again` means that `start` is trying another port."""
        self._should_run = self._should_run and again
        process = self._process
        if process is not None:
            self._segments |= segments(members(process.pid), self.program.leaves)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            kill_group(process.pid)
            for segment in self._segments:
                segment.unlink(missing_ok=True)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _spawn(self, host: str, port: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        self.options.log.parent.mkdir(parents=True, exist_ok=True)
        bypass_proxies(host)
        env = os.environ | {"SLIMECTL_PARENT": str(os.getpid()), "SLIMECTL_LEAVES": ":".join(self.program.leaves)}
        env |= {**self.program.env, **self.options.env}
        if self.program.own_tmp:
            self._scratch = env["TMPDIR"] = str(scratch_folder(OWN_TMP))
        command = [*self.program.command(host, port), *arguments]
        with self.options.log.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
                )
            except OSError as error:
                raise BackendError(f"{self._name}: {command[0]} cannot be run: {error.strerror}") from error
        return self._process

    def _wait_until_ready(self, process: subprocess.Popen[bytes], url: str, deadline: float) -> bool:
        """Wait until the server is ready. Return False if it died, was stopped, or timed out."""
        while process.poll() is None and self._should_run and time.monotonic() < deadline:
            note_progress()  # the start has a time limit of its own
            ready = self._is_ready(url) and process.poll() is None
            self._segments |= segments(
                members(process.pid), self.program.leaves
            )  # a dead server's segments cannot be listed
            if ready:
                return True
            time.sleep(POLL_S)
        return False

    def _is_ready(self, url: str) -> bool:
        with contextlib.suppress(BackendError):
            return run_coroutine(get(url + self.program.ready, timeout_s=10)).status == 200
        return False

    def _error_line(self) -> str:
        return error_line(tail(self.options.log, 2000, since=self._log_start))


def free_port(host: str, *, ports: int = 1) -> int:
    """Return the first of `ports` consecutive free ports. Raises BackendError if the machine has no such address."""
    for port in [*random.SystemRandom().sample(FIXED_PORTS, 16), 0]:
        first = _bound(host, port)
        if first is not None and all(_bound(host, first + i) is not None for i in range(1, ports)):
            return first
    raise BackendError(f"{host} has no {ports} consecutive free ports. Try again.")


def _bound(host: str, port: int) -> int | None:
    """Bind a socket to a port (0: any) and return the port, or None if it is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if port:
                return None
            raise BackendError(f"{host}: is not an address of this machine: {error.strerror}") from error
        return int(probe.getsockname()[1])


def _exit_reason(code: int | None, message: str) -> str:
    """Explain an exit code. Some servers (SGLang) kill themselves after logging the reason."""
    if code is None:
        return "it runs but does not respond"
    if code != -signal.SIGKILL:
        return f"exit code {code}"
    return "killed" if ERROR.search(message) is not None else "killed; out of memory?"
