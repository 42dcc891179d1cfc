"""Start slimectl commands by forking a process that has imported torch and transformers already.

Such a command is a process like any other: its own pid, descriptors, environment, working directory, signals and exit
code. It lacks only the seconds of importing. Tests of start-up, of memory and of other interpreters start a new
interpreter instead. With `pytest --no-fork` all do.

Programs of `python -c` start in the same way, and modules that PYTHONPATH of their environment names are found.

This file is both ends: tests call `start` or `run_python`; run as a script it is the server, one for every process of
pytest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

import zygote

SLIMECTL = Path(__file__).parents[1] / "slimectl"
STATUS_BYTES = 4
WITHOUT_CHILDREN = ("--help", "--version", "inspect", "metrics", "models", "plan", "runs", "settings")
"""First words of commands that start no processes."""
PACKAGES = (
    "agents", "algorithms", "checkpoints", "checkpoints/conversion", "cli", "data", "engines", "engines/embedded",
    "engines/server", "engines/supervisor", "engines/weight_sync", "executors", "hooks", "planner", "policies",
    "policies/fsdp", "rewards", "rewards/math", "runtime", "runtime/builders", "stages",
)  # fmt: skip
"""Packages whose modules most commands import."""
MODULES = (
    "huggingface_hub.serialization", "mpmath", "slimectl.engines.sglang.topology", "slimectl.recipes",
    "slimectl.trackers.stdout", "tomli_w", "transformers.loss.loss_utils", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3", "transformers.quantizers.auto", "typer.rich_utils", "xxhash",
)  # fmt: skip


class ForkedProcess:
    """A forked command, driven as subprocess.Popen is."""

    def __init__(self, pid: int, status: int, streams: dict[str, IO[bytes] | None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = (streams[name] for name in ("stdin", "stdout", "stderr"))
        self._status = status

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process lives."""
        return self._receive(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._receive(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(["slimectl"], timeout or 0.0)
        return code

    def _receive(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            data = os.read(self._status, STATUS_BYTES)
            assert data, "the fork server ended before this process"
            self.returncode = int.from_bytes(data, "little", signed=True)
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, data: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Write `data` to stdin, read stdout and stderr to their ends, and wait."""
        outputs: dict[str, bytes] = {"stdout": b"", "stderr": b""}

        def read(name: str, stream: IO[bytes]) -> None:
            outputs[name] = stream.read()

        readers = [
            threading.Thread(target=read, args=(name, stream), daemon=True)
            for name, stream in (("stdout", self.stdout), ("stderr", self.stderr))
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        if self.stdin is not None:
            try:
                self.stdin.write(data or b"")
                self.stdin.close()
            except BrokenPipeError:
                pass
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return outputs["stdout"], outputs["stderr"]

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


Process = ForkedProcess | subprocess.Popen[bytes]
forks = True
"""False with `pytest --no-fork`."""

_server: socket.socket | None = None


def start(
    arguments: list[str],
    *,
    cwd: Path,
    env: dict[str, str],
    stdin: Any = None,
    stdout: Any = None,
    stderr: Any = None,
    new_session: bool = False,
    fork_children: bool = True,
) -> Process:
    """Start `slimectl ARGUMENTS`; `stdin`, `stdout` and `stderr` mean what they mean to subprocess.Popen.

    Its workers, ranks and servers are forked too, unless `fork_children` is false: they then begin as for users.
    """
    streams = (stdin, stdout, stderr)
    return _start(None, arguments, cwd, env, *streams, new_session=new_session, fork_children=fork_children)


def start_python(
    code: str,
    arguments: Sequence[str] = (),
    *,
    cwd: Path,
    env: dict[str, str] | None = None,
    stdin: Any = None,
    stdout: Any = None,
    stderr: Any = None,
) -> Process:
    """Start `python -c CODE ARGUMENTS`; streams as of `start`."""
    return _start(code, [*arguments], cwd, env or {**os.environ}, stdin, stdout, stderr)


def run_python(
    code: str,
    arguments: Sequence[str] = (),
    *,
    cwd: Path,
    env: dict[str, str] | None = None,
    stdin: str = "",
    timeout_s: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE ARGUMENTS`, which reads the text `stdin`, to its end."""
    pipe = subprocess.PIPE
    with start_python(code, arguments, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            stdout, stderr = process.communicate(stdin.encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(["python", "-c", code], process.wait(), stdout.decode(), stderr.decode())


LIMITED = """
import resource, runpy, sys
limit = int(sys.argv.pop(2))
resource.setrlimit(getattr(resource, sys.argv.pop(1)), (limit, limit))
runpy.run_module("slimectl", run_name="__main__", alter_sys=True)
"""
"""Code of `python -c` that runs slimectl under a limit: its arguments begin with the limit's name and value."""


def _start(
    code: str | None,
    arguments: list[str],
    cwd: Path,
    env: dict[str, str],
    stdin: Any,
    stdout: Any,
    stderr: Any,
    *,
    new_session: bool = False,
    fork_children: bool = True,
) -> Process:
    if not forks:
        program = ["-m", "slimectl"] if code is None else ["-c", code]
        command = [sys.executable, *program, *arguments]
        pipes = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        return subprocess.Popen(
            command, cwd=cwd, env=env, start_new_session=new_session, preexec_fn=_take_signals, **pipes
        )
    streams: dict[str, IO[bytes] | None] = {"stdin": None, "stdout": None, "stderr": None}
    descriptors, temporary = [], []
    for number, (name, target) in enumerate([("stdin", stdin), ("stdout", stdout), ("stderr", stderr)]):
        if target is None:
            descriptors.append(number)
        elif target == subprocess.PIPE:
            reading, writing = os.pipe()
            streams[name] = open(writing, "wb") if number == 0 else open(reading, "rb")  # noqa: SIM115
            temporary.append(reading if number == 0 else writing)
            descriptors.append(temporary[-1])
        elif target == subprocess.STDOUT:
            descriptors.append(descriptors[1])
        elif target == subprocess.DEVNULL:
            temporary.append(os.open(os.devnull, os.O_RDWR))
            descriptors.append(temporary[-1])
        else:
            descriptors.append(target if isinstance(target, int) else target.fileno())
    status, report = os.pipe()
    request = {
        "code": code, "arguments": arguments, "cwd": str(cwd), "env": env, "new_session": new_session,
        "zygote": fork_children,
    }  # fmt: skip
    server = _connection()
    socket.send_fds(server, [json.dumps(request).encode()], [*descriptors, report])
    for descriptor in [*temporary, report]:
        os.close(descriptor)
    return ForkedProcess(int(server.recv(64)), status, streams)


def fork_children_of_tests() -> None:
    """Let the servers that tests start begin as forks, and what multiprocessing starts, once there is a fork server."""
    zygote.install(_zygote, only_servers=lambda: _server is None)


@functools.cache
def _zygote() -> socket.socket:
    """The connection to the process that forks children of this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "import os, socket, zygote\nzygote.serve(socket.socket(fileno=os.dup(0)))"
    _start(code, [], Path.cwd(), {**os.environ}, theirs, None, None, fork_children=False)
    theirs.close()
    return ours


@functools.cache
def ray_workers() -> str:
    """Return the address of the process that forks the workers of Ray (tests/ray_worker.py); it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = f"{tempfile.mkdtemp()}/ray_workers"
    atexit.register(shutil.rmtree, os.path.dirname(address))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        code = "import os, socket, zygote\nzygote.listen(*(socket.socket(fileno=os.dup(number)) for number in (1, 0)))"
        _start(code, [], Path.cwd(), {**os.environ}, theirs, listener, None, fork_children=False)
    theirs.close()
    atexit.register(ours.close)
    return address


def _connection() -> socket.socket:
    """The connection to this process's server, which ends with it."""
    global _server
    if _server is None:
        _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment
        )
        theirs.close()
        atexit.register(process.wait)
        atexit.register(_server.close)  # it reads the end of its socket and leaves
    return _server


# --- the server ------------------------------------------------------------------------------------------------------


def preload() -> None:
    """Import what takes time; nothing that starts a thread, or makes a folder that one child would remove for all."""
    sys.modules["wandb"] = None  # type: ignore[assignment]  # Megatron-core would import it, and it makes one
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    for package in PACKAGES:
        files = sorted((SLIMECTL / package).glob("[a-z]*.py"))
        assert files, f"no package slimectl/{package}"
        for file in files:
            import_module(f"slimectl.{package.replace('/', '.')}.{file.stem}")
    for module in MODULES:
        import_module(module)
    typer: Any = sys.modules["typer.main"]
    commands = typer.get_command(sys.modules["slimectl.cli.app"].app)
    typer.get_command = lambda _: commands  # made from the functions of all commands: 0.04 s in each child
    sys.modules["slimectl.settings"].Settings()  # pydantic prepares its validators with the first
    with contextlib.suppress(ImportError):  # Megatron-core is an extra
        import slimectl.policies.megatron.policy  # noqa: F401
    del sys.modules["wandb"]
    assert threading.active_count() == 1
    os.fsync = os.fdatasync = lambda _: None  # as in tests/conftest.py
    # What they would do at their end, in every child again: 0.1 s each.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)


HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25


def collapse_pages() -> None:
    """Put private memory into huge pages, so that a fork copies few page tables: 10 ms instead of 26 ms of CPU time.

    Linux 6.1 or later. Elsewhere nothing changes.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, name = [*line.split(maxsplit=5), ""][:6]
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if access == "rw-p" and name in ("", "[heap]") and start < end:
            madvise(start, end - start, MADV_COLLAPSE)


def serve(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a process for every request. Returns twice: a request in each child, None at the end of the connection."""
    gc.disable()  # collections would look at the objects of all modules, again and again
    preload()
    gc.freeze()  # a collection in a child would copy the pages of all these objects
    gc.set_threshold(10_000, 10, 10)  # as in tests/conftest.py
    gc.enable()
    collapse_pages()
    reports: dict[int, int] = {}
    wakeup, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready = select.select([control, wakeup], [], [])[0]
        if wakeup in ready:
            os.read(wakeup, 4096)
            _reap(reports)
        if control not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 4)
        if not message:
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for descriptor in (control.detach(), wakeup, waker, descriptors.pop(), *reports.values()):
                os.close(descriptor)
            return json.loads(message), descriptors
        reports[pid] = descriptors.pop()
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(pid).encode())


def _reap(reports: dict[int, int]) -> None:
    """Report the exit code of every child that has ended."""
    while reports:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        report = reports.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            os.write(report, os.waitstatus_to_exitcode(status).to_bytes(STATUS_BYTES, "little", signed=True))
        os.close(report)


def run_command(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Become `slimectl ARGUMENTS`, as `python -m slimectl` would run it, or `python -c CODE ARGUMENTS`, and exit."""
    _take_over(request, descriptors)
    arguments = ["-m", "slimectl"] if request["code"] is None else ["-c", request["code"]]
    arguments += request["arguments"]
    if request["zygote"] and request["arguments"][:1] not in [[word] for word in WITHOUT_CHILDREN]:
        zygote.fork_children()
    zygote.become(arguments)


def _take_signals() -> None:
    """Take signals that whatever started pytest may ignore: nohup, or a script with &."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _take_over(request: dict[str, Any], descriptors: list[int]) -> None:
    """Give this process the descriptors, environment and folder of the request."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _take_signals()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])


if __name__ == "__main__":
    child = serve(socket.socket(fileno=int(sys.argv[1])))
    if child is not None:
        run_command(*child)
