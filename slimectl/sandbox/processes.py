"""Counts, measures and ends the descendants of this process."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Usage:
    """Resources that a case uses at one moment."""

    tasks: int = 0
    """Processes and threads."""

    memory: int = 0
    """Bytes of memory of its processes. A page that several processes map counts once."""

    disk: int = 0
    """Bytes of its files, if they are not on a file system of a fixed size."""

    files: int = 0


class ProcessTree:
    """All descendants of this process, read from a /proc that was opened before the jail closed.

    A process whose parent has ended becomes a child of this one: the subreaper or first of its namespace.
    """

    def __init__(self, proc: int) -> None:
        self._proc = proc
        self._pid = os.readlink("self", dir_fd=proc)
        self._ticks: dict[str, int] = {}

    def pids(self) -> dict[str, int]:
        """Return the tasks of every descendant by process id, as this folder of /proc counts them."""
        tasks: dict[str, int] = {}
        unseen = self._children(self._pid)[0]
        while unseen:
            pid = unseen.pop()
            if pid not in tasks:
                children, tasks[pid] = self._children(pid)
                unseen += children
        return tasks

    def cpu_s(self) -> float:
        """Return the CPU seconds of all descendants since `reset_cpu`. For ended ones, use the last value."""
        for pid in self.pids():
            # The name of a process, in parentheses, may hold anything.
            fields = self._read(f"{pid}/stat").rpartition(")")[2].split()
            if fields:
                self._ticks[pid] = max(self._ticks.get(pid, 0), int(fields[11]) + int(fields[12]))
        return sum(self._ticks.values()) / TICKS_PER_S

    def reset_cpu(self) -> None:
        """Reset the count of CPU seconds. There must be no descendants."""
        self._ticks.clear()

    def usage(self, limit: int, *, isolated: bool) -> Usage:
        """Return the resources of the descendants. Shared pages are found only if the sum exceeds `limit`.

        Finding them is slow, so the processes are stopped meanwhile. They continue if they are within the limit.
        """
        tasks = self.pids()
        memory = sum(map(self._resident, tasks))
        if memory > limit:
            stopped = {-1} if isolated else self._stop_all()
            for pid in stopped & {-1}:
                _send_signal(pid, signal.SIGSTOP)
            tasks = self.pids()
            memory = sum(self._proportional(pid, self._resident(pid)) for pid in tasks)
            for pid in stopped if memory <= limit else ():
                _send_signal(pid, signal.SIGCONT)
        return Usage(sum(tasks.values()), memory)

    def add_files(self, usage: Usage, folder: str) -> None:
        """Count the files of a folder, and the open files that were removed from it."""
        folders = [folder]
        while folders:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        status = entry.stat(follow_symlinks=False)
                        usage.files, usage.disk = usage.files + 1, usage.disk + 512 * status.st_blocks
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
            except OSError:
                continue
        for pid in self.pids():
            self._add_removed_files(usage, pid)

    def _add_removed_files(self, usage: Usage, pid: str) -> None:
        for fd in self._listdir(f"{pid}/fd"):
            try:
                status = os.stat(f"{pid}/fd/{fd}", dir_fd=self._proc)
            except OSError:
                continue
            if status.st_nlink == 0:
                usage.files, usage.disk = usage.files + 1, usage.disk + 512 * status.st_blocks

    def _children(self, pid: str) -> tuple[list[str], int]:
        tasks = self._listdir(f"{pid}/task")
        texts = [self._read(f"{pid}/task/{task}/children") for task in tasks]
        return [child for text in texts for child in text.split()], len(tasks)

    def _resident(self, pid: str) -> int:
        fields = self._read(f"{pid}/statm").split()
        return int(fields[1]) * PAGE if fields else 0

    def _proportional(self, pid: str, resident: int) -> int:
        """Return the bytes of memory, each page divided by the processes that map it, or all bytes if unknown."""
        for line in self._read(f"{pid}/smaps_rollup").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
        return resident

    def _listdir(self, path: str) -> list[str]:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return []
        try:
            return os.listdir(folder)
        except OSError:
            return []
        finally:
            os.close(folder)

    def _read(self, path: str) -> str:
        """Return a file's text, or "" if the process has just ended."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return ""
        try:
            return os.read(file, 1 << 16).decode()
        except OSError:
            return ""
        finally:
            os.close(file)

    def kill_all(self, *, isolated: bool) -> None:
        """Kill and reap every descendant. The first process of a namespace reaches them all at once."""
        while True:
            for pid in [-1] if isolated else self._stop_all():
                _send_signal(pid, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
                while os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            except ChildProcessError:
                return

    def _stop_all(self) -> set[int]:
        """Stop every descendant, so that none forks while others are killed, and return their process ids."""
        stopped: set[int] = set()
        while pids := {int(pid) for pid in self.pids()} - stopped:
            for pid in pids:
                _send_signal(pid, signal.SIGSTOP)
            stopped |= pids
        return stopped


def _send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def clear_folder(path: str, keep: Sequence[str] = ()) -> None:
    """Remove all entries of a folder at any depth, except the paths to `keep` and their parents. Follow no link.

    No other process may write there at the same time. Nested folders are moved up before they are removed.
    """
    keep = [inner for inner in keep if inner.startswith(f"{path}/")]
    kept_names = {inner[len(path) + 1 :].partition("/")[0] for inner in keep}
    for name in kept_names:
        if f"{path}/{name}" not in keep:
            clear_folder(f"{path}/{name}", keep)
    with suppress(PermissionError):  # not our folder, so a program cannot have changed its mode either
        os.chmod(path, 0o700)
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    serial = 0
    try:
        while names := set(os.listdir(root)) - kept_names:
            for name in names:
                serial = _remove(root, name, serial)
    finally:
        os.close(root)


def _remove(root: int, name: str, serial: int) -> int:
    """Remove an entry. For a folder, move its subfolders up first. Return the next number for a name."""
    if not _is_folder(root, name):
        os.unlink(name, dir_fd=root)
        return serial
    os.chmod(name, 0o700, dir_fd=root)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
    try:
        for entry in os.listdir(folder):
            if _is_folder(folder, entry):
                os.chmod(entry, 0o700, dir_fd=folder)  # moving a folder writes its ".."
                serial = _free_number(root, serial)
                os.rename(entry, f"removed-{serial}", src_dir_fd=folder, dst_dir_fd=root)
            else:
                os.unlink(entry, dir_fd=folder)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=root)
    return serial


def _is_folder(root: int, name: str) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)


def _free_number(root: int, serial: int) -> int:
    """Return the next number whose name does not exist in the folder yet."""
    while True:
        serial += 1
        try:
            os.stat(f"removed-{serial}", dir_fd=root, follow_symlinks=False)
        except FileNotFoundError:
            return serial
