"""Runs the command line in children of one process that has loaded the heavy libraries.

A cold start of a command that needs torch costs four seconds of a core, a fork some milliseconds. The child is the
real program but for that: its arguments, its descriptors 0, 1 and 2, its exit code.

    result = run(["score", "samples.jsonl", "--rm-type", "exact"], cwd=folder)
    result.code, result.stdout, result.stderr
"""

from __future__ import annotations

import atexit
import os
import resource
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


MAX_CPU_S = 60
MAX_GROWTH_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class Result:
    """Exit code of a command (negative for a signal), its output, and how far its memory grew."""

    code: int | str
    stdout: bytes
    stderr: str
    growth_bytes: int = 0

    def problem(self, *, refused: bool) -> str:
        """Return what is wrong with it, in a line; empty if it refused, or where it may did, its work in good order."""
        lines = self.stderr.splitlines()
        if isinstance(self.code, str):
            return "waits for ever"
        if self.code < 0:
            return f"ended by signal {-self.code}"
        if "Traceback" in self.stderr:
            return f"a traceback: {lines[-1]}"
        if self.code not in (0, 1, 2, 3, 4):
            return f"exit code {self.code}"
        if self.growth_bytes > MAX_GROWTH_BYTES:
            return f"{self.growth_bytes >> 20} MiB of memory"
        if self.code and (len(lines) != 1 or not lines[0].startswith("slimectl: ")):
            return f"{len(lines)} lines for one: {' / '.join(lines)[:300]}"
        if refused and self.code not in (1, 2, 3):
            return f"exit code {self.code} where it is to be refused"
        return ""


def load() -> None:
    """Import what commands import, once, before the first child."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "COLUMNS": "200"}
    import numpy  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import slimectl.cli.app
    import slimectl.engines.embedded.engine
    import slimectl.policies.fsdp
    import slimectl.runtime.run
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
    """Run `slimectl ARGUMENTS` in a child; `prepare` runs there when its descriptors are set, before any of ours.

    A child that computes ends by its limit of CPU time; only one that waits for what never comes takes `timeout_s`.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            _become(arguments, (given.fileno(), out.fileno(), err.fileno()), cwd, environment or {}, prepare)
        code, peak = _wait(child, timeout_s)
        out.seek(0)
        err.seek(0)
        return Result(code, out.read(), err.read().decode(errors="replace"), max(0, peak - before) * 1024)


def _wait(child: int, timeout_s: float) -> tuple[int | str, int]:
    """Return the exit code of a child and its peak memory in KiB."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    return TIMEOUT_CODE, os.wait4(child, 0)[2].ru_maxrss


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
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
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
