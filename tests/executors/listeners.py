"""The addresses at which processes of this machine listen, from /proc."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

LISTENING = "0A"


def listen_addresses(pid: int | str = "self") -> list[str]:
    """Return the address of every TCP socket at which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            link = os.readlink(descriptor)
            if link.startswith("socket:["):
                inodes.add(link[8:-1])
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return [_address(row[1]) for row in rows if row[3] == LISTENING and row[9] in inodes]


def _address(field: str) -> str:
    """127.0.0.1 for 0100007F:1F90; the kernel writes words of 32 bits in the machine's own order."""
    digits = field.partition(":")[0]
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    packed = b"".join(words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
