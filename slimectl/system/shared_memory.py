"""Shared memory that other processes of this machine open by name. Later processes remove blocks of a killed owner."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Collection
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from slimectl.errors import StorageError

FOLDER = Path("/dev/shm")
PREFIX = "slimectl_"
"""Prefix of the names of blocks. The owner's process id follows, for people who look into the folder."""


class SharedMemoryFile:
    """A block of shared memory. Its owner holds a lock on the file until it closes the block.

    The kernel releases this flock however the owner ends. `remove_orphans` uses it to find blocks in use.
    """

    def __init__(self, nbytes: int) -> None:
        self._pid = os.getpid()
        while True:
            name = f"{PREFIX}{self._pid}_{secrets.token_hex(4)}"
            self.memory = SharedMemory(name, create=True, size=max(1, nbytes))
            path = FOLDER / name
            self._lock = _locked(path, wait=True)
            is_kept = path.exists() if self._lock is None else _is_named(path, self._lock)
            if is_kept or not FOLDER.is_dir():
                return
            self.close()  # another process removed it as an orphan before it was locked

    def allocate(self, start: int, end: int) -> None:
        """Allocate the pages from byte `start` to `end`. Raises OSError if there is not enough space."""
        if self._lock is not None:
            os.posix_fallocate(self._lock, start, end - start)

    def close(self) -> None:
        """Remove the block. Mappings of other processes, and of a forked child, stay valid."""
        self.memory.close()
        if os.getpid() != self._pid:
            return
        with suppress(FileNotFoundError):
            self.memory.unlink()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_orphans() -> None:
    """Remove this user's blocks whose owners have ended without closing them, as by kill -9."""
    with suppress(OSError):
        for path in FOLDER.glob(f"{PREFIX}*"):
            lock = _locked(path, wait=False)
            if lock is not None:
                try:
                    if _is_named(path, lock):
                        path.unlink()
                finally:
                    os.close(lock)


def remove_blocks_of(pids: Collection[int]) -> None:
    """Remove the blocks of processes that are about to end without closing them."""
    for pid in pids:
        for path in FOLDER.glob(f"{PREFIX}{pid}_*"):
            with suppress(OSError):
                path.unlink()


def check_writable() -> None:
    """Raise StorageError if no block can be created, as in a folder that is mounted read-only."""
    if not is_writable():
        raise unwritable(os.strerror(errno.EROFS))


def is_writable() -> bool:
    return not FOLDER.is_dir() or os.access(FOLDER, os.W_OK)


def unwritable(reason: str) -> StorageError:
    """Return the error for shared memory in which no block can be created."""
    return StorageError(
        f"{FOLDER}: {reason}. Weights reach engines through it. Mount it writable, or set sync.transport=disk"
    )


def free_bytes() -> int:
    """Return the free space of shared memory, or infinity on a system that has no folder for it."""
    if not FOLDER.is_dir():
        return sys.maxsize
    status = os.statvfs(FOLDER)
    return status.f_bavail * status.f_frsize


def _locked(path: Path, *, wait: bool) -> int | None:
    """Return a descriptor of a locked block, or None if it is in use or not a block of this user."""
    try:
        # Neither a symbolic link nor a pipe, whose open would block forever. Any user may create one there.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a block of this user")
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _is_named(path: Path, descriptor: int) -> bool:
    """Return whether the open file still has its name."""
    with suppress(OSError):
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    return False
