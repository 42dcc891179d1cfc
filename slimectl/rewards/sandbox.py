"""Programs that a model wrote, run where they can do no harm."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimectl.errors import BackendError
from slimectl.rewards.seccomp import AF_INET, AF_INET6, AF_UNIX, call_filter

CAGE = Path(__file__).with_name("cage.py")
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip
SOCKETS = (AF_UNIX, AF_INET, AF_INET6)
"""Families that a program may open: harmless without a network; only the first where there are no namespaces."""

STARTING_S = 5.0
"""How long an interpreter may take to start and shut itself in; not on the program's clock."""


@dataclass(frozen=True)
class Limits:
    """What a program may use. Time is by the wall clock; memory is each process's own."""

    timeout_s: float = 4.0
    """Seconds for all cases together."""

    test_timeout_s: float = 2.0
    """Seconds for one case."""

    memory_mib: int = 512
    processes: int = 8
    """Processes and threads at once, the program itself included."""

    disk_mib: int = 64
    max_output: int = 1 << 20
    """Bytes that a case may print."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended: `status` is "ended" (exit code 0), "exit code N", a signal's name, "out of time", "too much
    output" or "no time left"; `error` the last line of stderr; `report` what a statement or call gave."""

    status: str
    stdout: str = ""
    error: str = ""
    report: dict[str, Any] | None = None


def run_program(
    program: str, cases: list[dict[str, Any]], limits: Limits, *, allow_weaker: bool = False
) -> list[Outcome]:
    """Run a Python program once for every case, each time afresh; one outcome a case.

    A case is {input: text for stdin}, {code: statements to run after it} or {call: function, arguments: list}.

    The program runs in user, mount, process, network, IPC and host-name namespaces of its own, made with the rights of
    an ordinary user (Linux 5.12 or newer). It has no network, not even loopback; sees the interpreter, /usr and /lib,
    read-only, and an empty /tmp in memory; cannot see or signal another process; has no capabilities and cannot get
    any. Root runs it as nobody. System calls that lead elsewhere are refused (see seccomp). Limits hold for CPU time,
    memory, processes, file size and disk; at the end, or when we die, the kernel kills all that it started. A hole in
    the kernel is not covered, and memory in total is bounded only by processes times memory_mib.

    Where the kernel grants no namespaces, as in most containers, BackendError is raised. `allow_weaker` then runs the
    program with the limits, the killing, and what Landlock gives: other files are out of reach from Linux 5.13 on, TCP
    from 6.7, the signalling of others from 6.12. The filter of system calls leaves it no sockets but those that are
    files. What is left open: the list of processes, the disk behind the temporary folder, and for root, whom the limit
    on processes does not bind, their number. On older kernels, or where Landlock is switched off, all but sockets is
    open; use it for programs that are trusted otherwise.
    """
    if sys.platform != "linux":
        raise BackendError("score.rm_type=code: programs are shut in by Linux namespaces; grade them on Linux")
    outcomes, refused = _attempt(program, cases, limits, confine=True)
    if refused and allow_weaker:
        outcomes, refused = _attempt(program, cases, limits, confine=False)
    if refused:
        raise BackendError(
            f"score.rm_type=code: the kernel grants no sandbox ({refused}); allow user namespaces "
            f"(Docker: --security-opt seccomp=unconfined), or accept less: score.rm_options.allow_weaker=true"
        )
    missing = len(cases) - len(outcomes)
    return outcomes + [Outcome("no time left")] * missing


def _attempt(program: str, cases: list[dict[str, Any]], limits: Limits, *, confine: bool) -> tuple[list[Outcome], str]:
    """The outcomes, and why there is no sandbox ("" if there is)."""
    with tempfile.TemporaryDirectory(prefix="slimectl-code-", ignore_cleanup_errors=True) as home:
        job = {"program": program, "cases": cases, "confine": confine, "home": os.path.realpath(home),
               "readable": _readable(), "others": _others(confine),
               "filter": call_filter(SOCKETS if confine else SOCKETS[:1]).hex(), **asdict(limits)}  # fmt: skip
        lines = _answers(json.dumps(job).encode(), limits, len(cases))
    if not lines or "ready" not in lines[0]:
        return [], lines[0].get("refused", "") if lines else "the interpreter did not start"
    return [Outcome(**line) for line in lines[1:]], ""


def _answers(job: bytes, limits: Limits, count: int) -> list[dict[str, Any]]:
    """The lines that the cage wrote before it ended or its time was up."""
    command = [sys.executable, "-s", "-P", "-B", str(CAGE), str(os.getpid())]
    cage = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT,
        start_new_session=True,
    )  # fmt: skip
    assert cage.stdin is not None
    assert cage.stdout is not None
    try:
        try:
            cage.stdin.write(job)
            cage.stdin.close()
        except BrokenPipeError:
            return []
        text = _read(cage.stdout.fileno(), limits.timeout_s + STARTING_S, (count + 1) * 8 * (limits.max_output + 4096))
    finally:
        cage.kill()
        cage.wait()
        cage.stdout.close()
    try:
        return [json.loads(line) for line in text.split(b"\n")[:-1]]
    except (ValueError, RecursionError):
        return []


def _read(pipe: int, seconds: float, most: int) -> bytes:
    pieces, size, ends = [], 0, time.monotonic() + seconds
    while size < most and select.select([pipe], [], [], max(0.0, ends - time.monotonic()))[0]:
        piece = os.read(pipe, 1 << 16)
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def _readable() -> list[str]:
    """What the interpreter needs: itself, its libraries, its packages. A path inside an earlier one is left out."""
    kept: list[str] = []
    for path in (*SYSTEM, sys.base_prefix, sys.prefix, os.path.dirname(os.path.realpath(sys.executable))):
        inside = any(path == one or path.startswith(one + "/") for one in kept)
        if os.path.lexists(path) and not inside and path != "/":
            kept.append(path)
    return kept


def _others(confined: bool) -> int:
    """Processes of our user that the limit counts too: the cage's own, or without it all on the machine."""
    if confined:
        return 2 if os.getuid() else 1
    count = 2
    for process in os.listdir("/proc"):
        try:
            if process.isdigit() and os.stat(f"/proc/{process}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{process}/task"))
        except OSError:
            continue
    return count
