"""slimectl commands in children of a process that has imported everything: real exit codes at a tenth of the cost.

A cold start takes four seconds of CPU; a fork none. A child has a limit of CPU time; its exit code, what it wrote, and
the most memory it held are what an attack is judged by.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_CPU_S = 60
MAX_WALL_S = 120.0
"""Only what waits for something that never comes takes as long: a child that computes ends by its limit of CPU time."""
MAX_GROWTH_BYTES = 2 * 1024**3
CRASHED = 70


@dataclass(frozen=True)
class Outcome:
    """What came of a command."""

    code: int
    stdout: str
    stderr: str
    memory_bytes: int
    waited: bool

    def problem(self, *, refused: bool) -> str:
        """What is wrong with it, in a line; empty if it refused (or, where it may, did) its work in good order."""
        lines = self.stderr.splitlines()
        if self.waited:
            return "waits for ever"
        if self.code < 0:
            return f"ended by signal {-self.code}"
        if "Traceback" in self.stderr or self.code == CRASHED:
            return f"a traceback: {lines[-1] if lines else ''}"
        if self.code not in (0, 1, 2, 3, 4):
            return f"exit code {self.code}"
        if self.memory_bytes > MAX_GROWTH_BYTES:
            return f"{self.memory_bytes >> 20} MiB of memory"
        if self.code and (not lines or not lines[-1].startswith("slimectl: ") or len(lines) > 1):
            return f"{len(lines)} lines for one: {' / '.join(lines)[:300]}"
        if refused and self.code not in (1, 2, 3):
            return f"exit code {self.code} where it is to be refused"
        return ""


def warm_up() -> None:
    """Import what commands import, so that children have it."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "COLUMNS": "200"}
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    from transformers.models.llama import modeling_llama  # noqa: F401


def run(command: Sequence[str], folder: Path) -> Outcome:
    """Run a command in `folder`."""
    words = [folder / ".stdout", folder / ".stderr"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    child = os.fork()
    if child == 0:
        os._exit(_child(command, folder, words))
    status, usage = _wait(child)
    out, err = (path.read_text(errors="replace") for path in words)
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    return Outcome(code, out, err, max(0, usage.ru_maxrss * 1024 - before), status is None)


def _child(command: Sequence[str], folder: Path, words: list[Path]) -> int:
    os.setpgid(0, 0)
    os.chdir(folder)
    for descriptor, path in zip((1, 2), words, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from slimectl.cli.app import app

    try:
        app(list(command), standalone_mode=True)
        code: Any = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = CRASHED
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0 if code is None else 1


def _wait(child: int) -> tuple[int | None, Any]:
    """The status of a child, None if it had to be killed, and what it used."""
    end = time.monotonic() + MAX_WALL_S
    pause = 0.01
    while time.monotonic() < end:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage
        time.sleep(pause)
        pause = min(0.2, pause * 1.3)
    os.killpg(child, signal.SIGKILL)
    return None, os.wait4(child, 0)[2]
