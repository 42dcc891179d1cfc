"""Advisory locks, one writer per target. A lock records its holder, and is released however the holder ends.

These are the kernel's record locks (fcntl.lockf). flock's locks belong to the open file, which a forked child inherits,
so ranks, servers and graders that outlive a killed run for half a second would block `--resume`. Record locks belong to
one process and end with it. Their one pitfall is that they also end when the process closes any other descriptor of the
file. So the holder opens the file once and never reads it again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from slimectl.errors import SettingsError, StorageError

HELD = (errno.EACCES, errno.EAGAIN)
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of file systems without record locks (some network file systems)."""
MARK = "slimectl lock"
MAX_BYTES = 4096
"""Upper limit on the size of a lock file: a longer file of this name is not a lock."""

_held: dict[tuple[int, int], int] = {}
"""PID of the holder by (device, inode), for every lock held. A forked child inherits the table."""


@dataclass(frozen=True)
class Holder:
    """The process that wrote a lock file. `ticks` is its start time in clock ticks since `boot`."""

    host: str
    pid: int
    since: str
    boot: str = ""
    ticks: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def is_alive(self) -> bool:
        """Return whether the process may be running: False only if it has provably ended, never for another host."""
        if self.host != socket.gethostname():
            return True
        return self.boot == _boot_id() and self.ticks == _start_ticks(self.pid) != 0


def holder_of(path: Path) -> Holder | None:
    """Return the holder recorded in a lock file, or None.

    The holder itself must not call this: closing the file would end its lock.
    """
    with suppress(OSError):
        return _read(path.read_bytes()[:MAX_BYTES])
    return None


class Lock:
    """An exclusive lock on the file `path`, held until `release`, which removes the file.

    >>> with Lock(Path("runs/a/.slimectl.lock"), "runs/a: another run is active there"):  # doctest: +SKIP
    ...     train()

    The error for a lock that is held begins with `busy` and ends with `way_out`. `lockf` is the kernel's call.
    """

    def __init__(
        self,
        path: Path,
        busy: str,
        *,
        way_out: str = "Wait until it ends, or stop it.",
        warn: Callable[[str], None] = lambda text: None,
        lockf: Callable[[int, int], None] = fcntl.lockf,
    ) -> None:
        self.path = path
        self._busy, self._way_out, self._warn, self._lockf = busy, way_out, warn, lockf
        self._file: int | None = None
        self._pid = 0

    def acquire(self) -> Lock:
        """Acquire the lock. Raises SettingsError if a live process holds it, StorageError if it cannot be written."""
        try:
            while not self._try():
                pass
        except OSError as error:
            raise StorageError(
                f"{self.path}: the lock cannot be written: {error.strerror or error}. Free space, or write elsewhere."
            ) from error
        return self

    def release(self) -> None:
        """Remove the file and release the lock. A forked child does neither."""
        file, self._file = self._file, None
        if file is None or self._pid != os.getpid():
            return
        status = os.fstat(file)
        _held.pop((status.st_dev, status.st_ino), None)
        # Removed before it is released: a process waiting for this inode checks that the file still has its name.
        with suppress(OSError):
            self.path.unlink()
        os.close(file)

    def __enter__(self) -> Lock:
        return self if self._file is not None else self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def _try(self) -> bool:
        """Try once. Return whether the lock is acquired. If not, the file was replaced meanwhile, so try again."""
        if self.is_ours():
            raise self._refusal("this process")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self.path, flags, 0o644)
        try:
            old = self._take(file)
            status = os.fstat(file)
            if not _is_named(self.path, status):
                os.close(file)
                return False
            if old is not None and old.host != socket.gethostname():
                self._warn(f"{self.path}: {old} ended without releasing it. Taking over the lock.")
            os.ftruncate(file, 0)
            os.pwrite(file, _signature(), 0)
        except BaseException:
            os.close(file)
            raise
        self._file, self._pid = file, os.getpid()
        _held[status.st_dev, status.st_ino] = self._pid
        return True

    def is_ours(self) -> bool:
        """Return whether this process already holds the lock on this file, through this object or another."""
        with suppress(OSError):
            status = os.stat(self.path, follow_symlinks=False)
            return _held.get((status.st_dev, status.st_ino)) == os.getpid()
        return False

    def _take(self, file: int) -> Holder | None:
        """Lock the open file and return the stale holder recorded in it, if any. Raises SettingsError."""
        content = os.pread(file, MAX_BYTES + 1, 0)
        holder = _read(content)
        if content and holder is None:
            raise SettingsError(f"{self.path}: is not a slimectl lock. Move it away, or write elsewhere.")
        try:
            self._lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                raise self._refusal(str(_read(os.pread(file, MAX_BYTES, 0)) or "another process")) from None
            if error.errno not in UNSUPPORTED:
                raise
            self._check_unsupported(holder)
        return holder

    def _check_unsupported(self, holder: Holder | None) -> None:
        """Decide from the file's content only. Raises SettingsError if its holder may be alive."""
        if holder is not None and holder.is_alive():
            elsewhere = holder.host != socket.gethostname()
            hint = f" If that process has ended on {holder.host}, remove {self.path}." if elsewhere else ""
            raise self._refusal(str(holder), hint)
        self._warn(
            f"{self.path}: this file system has no locks, so two machines that start at the same instant are not "
            f"kept apart"
        )

    def _refusal(self, holder: str, hint: str = "") -> SettingsError:
        return SettingsError(f"{self._busy} ({holder}). {self._way_out}{hint}")


def _signature() -> bytes:
    record = {
        "mark": MARK,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "boot": _boot_id(),
        "ticks": _start_ticks(os.getpid()),
    }
    return json.dumps(record).encode() + b"\n"


def _read(content: bytes) -> Holder | None:
    """Parse the holder from the content of a lock file, or return None."""
    try:
        record: dict[str, Any] = json.loads(content)
        if record.pop("mark") != MARK:
            return None
        return Holder(**record)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _is_named(path: Path, status: os.stat_result) -> bool:
    """Return whether the open file still has its name. A holder removes it on release."""
    with suppress(OSError):
        named = os.stat(path, follow_symlinks=False)
        return (named.st_dev, named.st_ino) == (status.st_dev, status.st_ino)
    return False


def _boot_id() -> str:
    """Return the boot id of the machine, or "" if the kernel has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot, or 0 if it does not exist or is a zombie."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in ("Z", "X") else int(fields[19])
    return 0
