"""Extracts the error line of a server's log."""

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
    """Return the last lines of a file, from byte `since` on; "" if there is no file."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def cause(text: str) -> str:
    """Return the line that explains a failure.

    It is the first about memory, else the first error (later ones are its consequences), else the last line that is not
    a warning.
    """
    lines = text.splitlines()
    for pattern in (MEMORY, ERROR):
        match = next((line for line in lines if pattern.search(line)), None)
        if match is not None:
            return _short(match)
    return _short(next((line for line in reversed(lines) if not NOISE.search(line)), "it wrote nothing"))


def names_error(line: str) -> bool:
    return ERROR.search(line) is not None


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= 300 else line[:297] + "..."
