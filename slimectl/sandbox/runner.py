"""Launcher of the sandbox: runs programs that a model wrote, in isolation."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimectl.errors import BackendError
from slimectl.sandbox.processes import clear_folder
from slimectl.sandbox.seccomp import call_filter
from slimectl.sandbox.supervisor import WALL_FACTOR

START = (
    "import sys, types; package = types.ModuleType('slimectl'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['slimectl'] = package; from slimectl.sandbox.jail import start_from; start_from(sys.argv[2:])"
)
"""Starts the jail from its own files, without the imports of slimectl's packages."""

SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
INSTALLATION = ("bin", "lib", "lib64", "include", "pyvenv.cfg")
"""Folders of Python below its prefix."""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip
STARTING_S = 60.0
"""Seconds for the interpreter to start and enter the jail on a busy machine. They do not count for the program."""

ENDING_S = 10.0
"""Seconds for a jail to exit after its time is up."""


@dataclass(frozen=True)
class Limits:
    """Resources that a program may use. Time is CPU time. The wall-clock limit is ten times as long."""

    timeout_s: float = 4.0
    """CPU seconds of all cases together."""

    test_timeout_s: float = 2.0
    """CPU seconds of one case."""

    memory_mib: int = 512
    """Memory of all processes of a case together, and the address space of each process."""

    processes: int = 8
    """Processes and threads at the same time, including the program itself."""

    disk_mib: int = 64
    """Files of a case, in memory, in addition to `memory_mib`."""

    max_output: int = 1 << 20
    """Bytes that a case may print."""


@dataclass(frozen=True)
class Outcome:
    """Result of a case.

    `status` is "ended" (exit code 0), "exit code N", a signal's name, "out of time", "too much output", "too much
    memory", "no time left" or, for statements, "failed". `error` is the last line of stderr, or the reason why
    statements failed. `report` is {"value": …} for a call or {"passed": True} for statements.
    """

    status: str
    stdout: str = ""
    error: str = ""
    report: dict[str, Any] | None = None


def longest_s(timeout_s: float) -> float:
    """Return the wall-clock limit of programs with this CPU limit, including start and exit."""
    return STARTING_S + WALL_FACTOR * timeout_s + ENDING_S


def run_program(
    program: str,
    cases: list[dict[str, Any]],
    limits: Limits,
    *,
    imports: bool = False,
    allow_unsandboxed_namespaces: bool = False,
    purpose: str = "score.rm_type=code",
) -> list[Outcome]:
    """Run a Python program in a new process for every case, and return one outcome per case.

    A case is {input: text for stdin}, {code: statements to run after it} or {call: function, arguments: list}.
    Statements run in a separate process (see judge.py), so the program never gets their expected values. With `imports`
    the program may use names of the standard library without importing them (program.IMPORTS). Errors start with
    `purpose`.

    Isolation: the program has its own user, mount, process, network, IPC and host-name namespaces, made with the rights
    of an ordinary user (Linux 5.12 or newer). If root may not make a user namespace, it makes the others. The program
    has no network, not even loopback. It sees the interpreter, /usr and /lib, read-only, and an empty /tmp and /dev/shm
    in memory. It cannot see or signal another process, has no capabilities and cannot get any. Root runs it as another
    user. System calls that lead elsewhere are refused (see seccomp). Its environment and its open files have nothing of
    this process. At the end, or if this process dies, the kernel kills everything that the program started. Kernel bugs
    are not covered.

    Memory: the processes of a case hold `memory_mib` together, and its files `disk_mib`. A page that several processes
    share counts once. The kernel limits the files, and the addresses of each process to `memory_mib`. The sum is read
    every 5 ms, and a case over the limit is killed. Until then its processes can take more, up to `processes` times
    `memory_mib`. With 512 MiB for 7 processes on two cores with 8 times their work, cases were killed at 540 to 1070
    MiB. Other memory is refused, except pipes and socket pairs (at most 13 MiB a process). A judge has its own
    `memory_mib`.

    Without namespaces: most containers do not grant them, and BackendError is raised. `allow_unsandboxed_namespaces`
    then runs the program with everything else: another user, no capabilities, all limits, the filter and Landlock
    (Linux 5.13). The filter refuses all sockets except pairs, and Landlock refuses all other files. Signals to others
    are refused by Landlock from Linux 6.12 on, and by the filter before. If one of these is unavailable, BackendError
    is raised.

    Gaps without namespaces: the program can count processes. Its files are on the disk of the temporary folder, where
    their size is read every 50 ms. A file that was removed while it is mapped is not counted.
    """
    if sys.platform != "linux":
        raise BackendError(f"{purpose}: the sandbox needs Linux namespaces. Use a Linux machine.")
    outcomes, refusal = _attempt(program, cases, limits, imports=imports, isolated=True)
    if refusal and allow_unsandboxed_namespaces:
        outcomes, weaker_refusal = _attempt(program, cases, limits, imports=imports, isolated=False)
        if weaker_refusal:
            raise BackendError(
                f"{purpose}: the kernel grants no sandbox ({refusal}), and without namespaces a program cannot be "
                f"confined ({weaker_refusal}). Allow user namespaces, or use another machine."
            )
    elif refusal:
        raise BackendError(
            f"{purpose}: the kernel grants no sandbox ({refusal}). Allow user namespaces (Docker: "
            f"--security-opt seccomp=unconfined), or accept less: score.rm_options.allow_unsandboxed_namespaces=true"
        )
    missing = len(cases) - len(outcomes)
    return outcomes + [Outcome("no time left")] * missing


def _attempt(
    program: str, cases: list[dict[str, Any]], limits: Limits, *, imports: bool, isolated: bool
) -> tuple[list[Outcome], str]:
    """Return the outcomes, and the error if the sandbox cannot start ("" if it can)."""
    tests = {at: case["code"] for at, case in enumerate(cases) if "code" in case}
    with _temporary_folder() as home:
        try:
            program_filter = call_filter(limit_signals=not isolated)
        except ValueError as error:
            return [], str(error)
        job = {"program": program, "imports": imports, "isolated": isolated, "home": home, "readable": readable_paths(),
               "cases": [{"judged": True} if "code" in case else case for case in cases],
               "filter": program_filter.hex(), **asdict(limits)}  # fmt: skip
        lines, verdicts = _run_jail(job, tests, limits)
    refusal = next((line["refused"] for line in lines if "refused" in line), "")
    if refusal or not lines or "ready" not in lines[0]:
        return [], refusal or "the interpreter did not start"
    return [
        _outcome(line, verdicts.get(at) if at in tests else None, at in tests) for at, line in enumerate(lines[1:])
    ], ""


def _outcome(line: dict[str, Any], verdict: dict[str, Any] | None, judged: bool) -> Outcome:
    """Combine the reports of the supervisor and the judge on a case."""
    status, stdout, error = line["status"], line["stdout"], line["error"]
    if not judged:
        return Outcome(status, stdout, error, _parsed(line["report"]))
    if verdict and verdict.get("passed") is True and not status.startswith(("out of", "too m")):
        return Outcome("ended", stdout, report={"passed": True})
    reason = str((verdict or {}).get("reason") or "ended before the test had run")
    return Outcome("failed", stdout, reason) if status == "ended" else Outcome(status, stdout, error)


def _parsed(report: str) -> dict[str, Any] | None:
    """Return the report of a case, or None if it is not a JSON object."""
    try:
        value = json.loads(report or "null")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """Yield a folder. Remove it without following any link that a program has put there."""
    home = os.path.realpath(tempfile.mkdtemp(prefix="slimectl-code-"))
    try:
        yield home
    finally:
        with suppress(OSError):
            clear_folder(home)
            os.rmdir(home)


def _run_jail(
    job: dict[str, Any], tests: dict[int, str], limits: Limits
) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """Return the lines that the jail wrote until it ended or its time was up, and the verdicts by case."""
    verdicts_read, verdicts_write = os.pipe()
    tests_fd = os.memfd_create("tests", os.MFD_CLOEXEC)
    with open(tests_fd, "w", closefd=False) as file:
        json.dump(tests, file)
    os.lseek(tests_fd, 0, os.SEEK_SET)
    package = str(Path(__file__).parent.parent)
    numbers = [os.getpid(), tests_fd if tests else -1, verdicts_write if tests else -1]
    jail = subprocess.Popen(
        [sys.executable, "-s", "-P", "-c", START, package, *map(str, numbers)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT,
        start_new_session=True, pass_fds=[fd for fd in numbers[1:] if fd >= 0],
    )  # fmt: skip
    os.close(verdicts_write)
    os.close(tests_fd)
    assert jail.stdin is not None
    assert jail.stdout is not None
    try:
        with suppress(BrokenPipeError), jail.stdin:
            jail.stdin.write(json.dumps(job).encode())
        count = len(job["cases"]) + 1
        max_bytes = count * 8 * (limits.max_output + 4096)
        texts = _read({jail.stdout.fileno(): max_bytes, verdicts_read: max_bytes}, limits.timeout_s * WALL_FACTOR)
    finally:
        jail.kill()
        jail.wait()
        _read({jail.stdout.fileno(): 1 << 30}, 0.0)  # without namespaces its processes end a little later
        jail.stdout.close()
        os.close(verdicts_read)
    lines, verdicts = (_json_lines(text) for text in texts)
    return lines, {line["case"]: line for line in verdicts}


def _json_lines(text: bytes) -> list[dict[str, Any]]:
    """Parse the complete lines of a text."""
    try:
        return [json.loads(line) for line in text.split(b"\n")[:-1]]
    except (ValueError, RecursionError):
        return []


def _read(pipes: dict[int, int], seconds: float) -> list[bytes]:
    """Read pipes to the end, to a number of bytes each, or until time is up. Time starts with the first byte."""
    pieces: dict[int, list[bytes]] = {pipe: [] for pipe in pipes}
    sizes = dict.fromkeys(pipes, 0)
    deadline, started, unclosed = time.monotonic() + STARTING_S, False, set(pipes)
    while unclosed:
        ready = select.select(list(unclosed), [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            break
        for pipe in ready:
            piece = os.read(pipe, 1 << 16)
            pieces[pipe].append(piece)
            sizes[pipe] += len(piece)
            if not piece or sizes[pipe] > pipes[pipe]:
                unclosed.discard(pipe)
        if not started:
            deadline, started = time.monotonic() + seconds + ENDING_S, True
    return [b"".join(pieces[pipe]) for pipe in pipes]


def readable_paths() -> list[str]:
    """Return the paths that the interpreter needs: itself, its libraries and packages, without nested paths.

    Only an installation's own folders are included, because a virtual environment may be the user's project folder.
    """
    prefixes = (sys.base_prefix, sys.prefix, os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    parts = (os.path.join(prefix, part) for prefix in prefixes for part in INSTALLATION)
    libraries = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    readable: list[str] = []
    for path in (*SYSTEM, *parts, *libraries):
        inside = any(path == parent or path.startswith(parent + "/") for parent in readable)
        if os.path.lexists(path) and not inside and path != "/":
            readable.append(path)
    return readable
