"""Process of a case: it starts with four open files, runs the program, and answers its judge where it has one."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from slimectl.sandbox.privileges import confine

ERROR_BYTES = 2000
"""Bytes of a case's stderr that are retained."""

REPORT = 3
"""The descriptor over which a case reports: its value, or all that its judge asks for."""


def start(action: Callable[[], None], *fds: int) -> None:
    """Run an action in this process, a fresh child, with no open file but these, as 0 to 3; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for at, fd in enumerate(fds):
            os.dup2(fd, 100 + at)
        os.closerange(0, 100)
        for at in range(len(fds)):
            os.dup2(100 + at, at)
        os.closerange(len(fds), 1 << 20)
        action()
        code = 0
    finally:
        os._exit(code)


def play(job: dict[str, Any], case: dict[str, Any]) -> NoReturn:
    """Run the program in this process, then its call or its judge's requests; never returns."""
    code = 1
    try:
        confine(job)
        enter_workdir(case["folder"])
        code = execute(job["program"], case)
    except BaseException as error:
        code = fail(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                code = code or 1
        os._exit(code)


def enter_workdir(folder: str) -> None:
    """Work in a folder that no earlier case has written to."""
    os.mkdir(folder)
    os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = folder


def execute(program: str, case: dict[str, Any]) -> int:
    """Run the program as __main__; report what the case's call gives, or answer its judge. Returns the exit code."""
    main = ModuleType("__main__")
    for name in [name for name in sys.modules if name.partition(".")[0] == "slimectl"]:
        del sys.modules[name]
    sys.modules["__main__"], sys.argv, sys.orig_argv = main, ["solution.py"], []
    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
    exec(compile(program, "solution.py", "exec"), main.__dict__)
    if "call" in case:
        owner = main if hasattr(main, case["call"]) or not hasattr(main, "Solution") else main.Solution()
        value = getattr(owner, case["call"])(*case["arguments"])
        write_all(REPORT, json.dumps({"value": value}).encode())
    if case.get("judged"):
        case["serve"](REPORT, main)
    return 0


def fail(error: BaseException) -> int:
    """Return the exit code of a program that raised, its reason on stderr."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    text = f"{type(error).__name__}: {error}"[:ERROR_BYTES].removesuffix(": ")
    write_all(2, b"\n" + text.encode("utf-8", "replace").replace(b"\n", b" "))
    return 1


def write_all(file: int, text: bytes) -> None:
    """Write every byte to a file or a pipe."""
    while text:
        text = text[os.write(file, text) :]
