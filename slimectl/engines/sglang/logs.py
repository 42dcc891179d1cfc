"""What a server's log says when one line must do."""

from __future__ import annotations

import os
import re
from pathlib import Path

TAIL_BYTES = 256 * 1024

MEMORY = re.compile(
    r"out of memory|OutOfMemory|not enough memory|MemoryError|bad_alloc|can(no|')t allocate memory|leave no GPU memory",
    re.I,
)
ERROR = re.compile(r"^(?:\[[^\]]*\]\s*)?(?:[\w.]*\.)?\w*(?:Error|Exception)\b.*:\s*\S")
NOISE = re.compile(r"warn|^\s*$|^\s*(File |\^|~)", re.I)


def tail(log: Path, lines: int, *, since: int = 0) -> str:
    """The last lines of a file, of its part from byte `since` on; "" where there is none."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def cause(text: str) -> str:
    """The line that says why: about memory if any is, else the first error (what follows it is its wake), else the
    last line that is not a warning.
    """
    lines = text.splitlines()
    for pattern in (MEMORY, ERROR):
        found = next((line for line in lines if pattern.search(line)), None)
        if found is not None:
            return _short(found)
    return _short(next((line for line in reversed(lines) if not NOISE.search(line)), "it wrote nothing"))


def names_error(line: str) -> bool:
    return ERROR.search(line) is not None


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= 300 else line[:297] + "..."
