"""Lets processes of one machine reach each other: no proxy in between, and paths short enough for sockets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slimectl.errors import StorageError

LOOPBACK = ("localhost", "127.0.0.1")
SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket: sun_path of unix(7), without its terminating zero."""
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
RANDOM_CHARACTERS = 8
"""Characters that `tempfile` appends to a prefix."""
BELOW_BYTES = 48
"""Bytes reserved below a temporary folder. SGLang, vLLM and multiprocessing append up to 45, such as /UUID."""


def without_proxy(environ: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return NO_PROXY and no_proxy for an environment: its current exclusions, loopback addresses, and `hosts`."""
    listed = [entry.strip() for name in ("no_proxy", "NO_PROXY") for entry in environ.get(name, "").split(",")]
    entries = dict.fromkeys(entry for entry in [*listed, *LOOPBACK, *hosts] if entry)
    text = "*" if "*" in entries else ",".join(entries)
    return {"NO_PROXY": text, "no_proxy": text}


def bypass_proxies(*hosts: str) -> None:
    """Let this process, and processes that it starts from now on, reach loopback and `hosts` without a proxy."""
    os.environ.update(without_proxy(os.environ, *hosts))


def scratch_folder(prefix: str, *, below_bytes: int = BELOW_BYTES) -> Path:
    """Make a private folder for temporary files and sockets, in a short place if TMPDIR is too long for sockets."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_root(len(prefix) + below_bytes)))


@contextmanager
def short_temporary_folders() -> Iterator[None]:
    """Inside the block, let libraries that create socket folders with `tempfile` create them in a short place."""
    previous = tempfile.tempdir
    tempfile.tempdir = _root(len("pymp-") + BELOW_BYTES)
    try:
        yield
    finally:
        tempfile.tempdir = previous


def has_room(folder: str, below_bytes: int) -> bool:
    """Return whether a socket's path may have this many bytes below a folder."""
    return len(os.fsencode(folder)) + below_bytes <= SOCKET_PATH_BYTES


def _root(below_bytes: int) -> str:
    """Return the folder of temporary files, or a short one. Raises StorageError if there is none."""
    default = tempfile.gettempdir()
    for folder in (default, *SHORT_FOLDERS):
        if has_room(folder, len("/") + RANDOM_CHARACTERS + below_bytes) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise StorageError(
        f"TMPDIR={default}: too long for sockets (their paths have at most {SOCKET_PATH_BYTES} bytes), and none of "
        f"{', '.join(SHORT_FOLDERS)} is writable. Set TMPDIR to a shorter path"
    )
