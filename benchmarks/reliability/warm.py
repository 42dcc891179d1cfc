"""Runs the command line in children of one process that has loaded the heavy libraries.

A cold start of a command that needs torch costs four seconds of a core, a fork some milliseconds. The child is the
real program but for that: its arguments, its descriptors 0, 1 and 2, its exit code.

    result = run(["score", "samples.jsonl", "--rm-type", "exact"], cwd=folder)
    result.code, result.stdout, result.stderr
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_CODE = "no end"
"""Stands for the exit code of a child that did not end by itself."""


@dataclass(frozen=True)
class Result:
    """What became of a command: its exit code (negative for a signal), and what it wrote."""

    code: int | str
    stdout: bytes
    stderr: str


def load() -> None:
    """Import what commands import, once, before the first child."""
    import numpy  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import slimectl.cli.app
    import slimectl.engines.embedded.engine
    import slimectl.job
    import slimectl.policies.fsdp
    import slimectl.stages.train  # noqa: F401

    torch.set_num_threads(1)


def run(
    arguments: Sequence[str],
    *,
    cwd: Path,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    prepare: Callable[[], None] = lambda: None,
    timeout_s: float = 120.0,
) -> Result:
    """Run `slimectl ARGUMENTS` in a child; `prepare` runs there when its descriptors are set, before any of ours."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            _become(arguments, (given.fileno(), out.fileno(), err.fileno()), cwd, environment or {}, prepare)
        code = _wait(child, timeout_s)
        out.seek(0)
        err.seek(0)
        return Result(code, out.read(), err.read().decode(errors="replace"))


def _wait(child: int, timeout_s: float) -> int | str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return TIMEOUT_CODE


def _become(
    arguments: Sequence[str],
    descriptors: Sequence[int],
    cwd: Path,
    environment: Mapping[str, str],
    prepare: Callable[[], None],
) -> None:
    """Be the command, to its end; never returns."""
    code = 70
    try:
        atexit._clear()  # what the parent would clean up is still its own
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, 256)
        os.chdir(cwd)
        os.environ.update(environment)
        # Worker processes that are spawned import the main module again: that of the program has nothing in it.
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv = ["slimectl", *arguments]
        prepare()
        sys.stdin, sys.stdout, sys.stderr = (_stream(number) for number in range(3))
        code = _main()
    except BaseException as error:  # of this harness
        os.write(2, f"harness: {error!r}\n".encode())
    finally:
        os._exit(code)


def _stream(number: int) -> object:
    """As the interpreter opens a standard stream when it starts: None where the descriptor is closed."""
    try:
        os.fstat(number)
    except OSError:
        return None
    return open(number, "w" if number else "r", encoding="utf-8", closefd=False)


def _main() -> int:
    import threading
    import traceback

    from slimectl.cli import main

    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except Exception:  # as the interpreter, which then exits so
        code = 120
    return code
