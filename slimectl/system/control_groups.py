"""Memory and control groups of this machine, from /proc and /sys (cgroups(7), versions 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that this machine has, or that a control group of this process may use, and how many of them are free."""

    total: int
    free: int


def memories(root: Path = ROOT) -> Iterator[Memory]:
    """Yield the machine's memory, then that of every control group with a limit. Yield nothing if it is unknown.

    Pages of files that the kernel can drop count as free.
    """
    with suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        yield Memory(total, free)
        for group in control_groups("memory", root):
            for limit_file, used_file, dropped in (
                ("memory.max", "memory.current", "inactive_file"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            ):
                limit = number(group / limit_file)
                if limit is not None and limit < total:  # version 1 writes a huge number for no limit
                    used = number(group / used_file) or 0
                    yield Memory(limit, max(0, limit - used + _dropped(group / "memory.stat", dropped)))


def control_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those around it."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                base = root / "sys/fs/cgroup" / (controller if controllers else "")
                yield from (base / str(folder).lstrip("/") for folder in (Path(path), *Path(path).parents))


def number(path: Path) -> int | None:
    """Return the number in a file, or None if there is none: without a limit, a file has the word max or -1."""
    with suppress(OSError, ValueError):
        return found if (found := int(path.read_text())) >= 0 else None
    return None


def _dropped(path: Path, name: str) -> int:
    with suppress(OSError, ValueError, KeyError):
        return int(dict(line.split() for line in path.read_text().splitlines())[name])
    return 0
