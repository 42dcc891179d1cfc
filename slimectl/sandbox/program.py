"""Process of a case. It starts with four open files, runs the program, and answers its judge if there is one."""

from __future__ import annotations

import builtins
import importlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, KeysView, ValuesView
from types import ModuleType
from typing import Any, NoReturn

from slimectl.sandbox.privileges import confine

ERROR_BYTES = 2000
"""Bytes of a case's stderr that are retained."""

REPORT = 3
"""Descriptor for a case's report: its value, or the answers to its judge."""


SET = "(set)"
"""Key of the object that represents a set in a report. Its value is the list of members."""

IMPORTS = ("operator", "string", "re", "datetime", "copy", "io", "json", "sys", "random", "statistics", "math",
           "itertools", "functools", "bisect", "heapq", "collections", "typing")  # fmt: skip
"""Modules whose names a program may use without imports if the job allows it. Later ones take precedence."""


def start(action: Callable[[], None], *fds: int) -> None:
    """Run an action in this process, a fresh child, with only these open files, as 0 to 3. Never returns."""
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
    """Run the program in this process, then its call or its judge's requests. Never returns."""
    code = 1
    try:
        confine(job)
        enter_workdir(case["folder"])
        code = execute(job, case)
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
    """Change to a folder that no earlier case has written to."""
    os.mkdir(folder)
    os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = folder


def execute(job: dict[str, Any], case: dict[str, Any]) -> int:
    """Run the job's program as __main__, report the value of a call or answer its judge, and return the exit code."""
    main = ModuleType("__main__")
    for name in [name for name in sys.modules if name.partition(".")[0] == "slimectl"]:
        del sys.modules[name]
    sys.modules["__main__"], sys.argv, sys.orig_argv = main, ["solution.py"], []
    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.set_int_max_str_digits(0)  # printing a long integer takes CPU time, which is limited
    if job["imports"]:
        main.__dict__["__builtins__"] = imported_names() | vars(builtins)
    exec(compile(job["program"], "solution.py", "exec", dont_inherit=True), main.__dict__)
    if "call" in case:
        owner = main if hasattr(main, case["call"]) or not hasattr(main, "Solution") else main.Solution()
        value = getattr(owner, case["call"])(*case["arguments"])
        write_all(REPORT, json.dumps({"value": value}, default=plain_value).encode())
    if case.get("judged"):
        case["serve"](REPORT, main)
    return 0


def imported_names() -> dict[str, Any]:
    """Return the names of the modules in IMPORTS, and the modules. As builtins, the program's own names hide them."""
    modules = {name: importlib.import_module(name) for name in IMPORTS}
    names: dict[str, Any] = {}
    for module in modules.values():
        exported = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        names |= {name: getattr(module, name) for name in exported}
    return names | modules


def plain_value(value: Any) -> Any:
    """Return the JSON of a set, an array or another iterable value. Raises TypeError for other values."""
    if isinstance(value, set | frozenset):
        return {SET: list(value)}
    if isinstance(value, deque | range | KeysView | ValuesView):
        return list(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def fail(error: BaseException) -> int:
    """Write the error of a program to stderr, and return its exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    text = f"{type(error).__name__}: {error}"[:ERROR_BYTES].removesuffix(": ")
    write_all(2, b"\n" + text.encode("utf-8", "replace").replace(b"\n", b" "))
    return 1


def write_all(file: int, text: bytes) -> None:
    """Write every byte to a file or a pipe."""
    while text:
        text = text[os.write(file, text) :]
