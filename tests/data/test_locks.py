"""One writer a target: held locks are refused, stale ones taken over, whatever became of their holder."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slimectl.data.locks import Lock
from slimectl.errors import SettingsError, StorageError


@contextmanager
def other_process(work: Callable[[], None]) -> Iterator[int]:
    """A forked process that has done `work` and waits to be killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(writing, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"x"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def lock(path: Path, **options: Any) -> Lock:
    return Lock(path, "runs/a: another run is active there", **options)


def test_a_held_lock_is_refused_with_its_holder_and_free_once_that_is_killed(tmp_path: Path):
    path = tmp_path / "lock"
    with other_process(lambda: lock(path).acquire() and None) as pid:
        host = socket.gethostname()
        with pytest.raises(
            SettingsError, match=rf"^runs/a: another run is active there \(process {pid} on {host} since \d+-.*\)\."
        ):
            lock(path).acquire()
    with lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not path.exists()


def test_a_child_that_outlives_its_killed_parent_does_not_hold_its_lock(tmp_path: Path):
    """What flock would do: ranks and servers linger for half a second after a kill -9."""
    path, child = tmp_path / "lock", tmp_path / "child"

    def hold_and_fork() -> None:
        lock(path).acquire()
        pid = os.fork()
        if pid == 0:
            signal.pause()
        child.write_text(str(pid))

    with other_process(hold_and_fork), pytest.raises(SettingsError):
        lock(path).acquire()
    lingering = int(child.read_text())
    os.kill(lingering, 0)
    try:
        with lock(path):
            pass
    finally:
        os.kill(lingering, signal.SIGKILL)


def test_a_forked_child_frees_nothing(tmp_path: Path):
    path = tmp_path / "lock"
    with lock(path) as held:
        pid = os.fork()
        if pid == 0:
            held.release()
            os._exit(0)
        os.waitpid(pid, 0)
        assert path.exists()


def test_the_same_process_is_refused_too_and_keeps_what_it_holds(tmp_path: Path):
    path = tmp_path / "lock"
    with lock(path):
        with pytest.raises(SettingsError, match="this process"):
            lock(path).acquire()

        def taken() -> None:
            with pytest.raises(SettingsError):
                lock(path).acquire()

        with other_process(taken):
            pass
    with lock(path):
        pass


def unsupported(*_: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_without_locks_of_the_kernel_the_files_words_decide(tmp_path: Path):
    path, words = tmp_path / "lock", list[str]()
    with (
        other_process(lambda: lock(path, lockf=unsupported).acquire() and None),
        pytest.raises(SettingsError, match=r"process \d+ on "),
    ):
        lock(path, lockf=unsupported).acquire()
    with lock(path, lockf=unsupported, warn=words.append):
        assert "this file system has no locks" in words[0]


@pytest.mark.parametrize(
    ("change", "free"),
    [
        ({"host": "another"}, False),  # nobody here can know
        ({"boot": "an earlier boot"}, True),
        ({"ticks": 1}, True),  # the number was given to another process since
        ({"pid": 2**22 + 1}, True),
        ({}, False),
    ],
)
def test_a_stale_lock_is_known_by_host_boot_process_and_start(tmp_path: Path, change: dict[str, Any], free: bool):
    path = tmp_path / "lock"
    with other_process(lambda: lock(path, lockf=unsupported).acquire() and None):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        if free:
            lock(path, lockf=unsupported).acquire().release()
            return
        with pytest.raises(SettingsError, match="another run is active there") as refusal:
            lock(path, lockf=unsupported).acquire()
    assert ("remove " in str(refusal.value)) == bool(change)


def test_somebody_elses_file_and_a_link_are_left_alone(tmp_path: Path):
    path = tmp_path / "lock"
    path.write_text("my notes\n")
    with pytest.raises(SettingsError, match=r"is not a slimectl lock\. Move it away"):
        lock(path).acquire()
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(StorageError, match="link: the lock cannot be written"):
        lock(tmp_path / "link").acquire()
    assert path.read_text() == "my notes\n"


def test_who_waited_for_a_lock_that_went_with_its_file_tries_again(tmp_path: Path):
    """Between the opening of the file and the lock the holder left, and removed it."""
    path = tmp_path / "lock"
    attempts: list[int] = []

    def late(file: int, operation: int) -> None:
        attempts.append(file)
        if len(attempts) == 1:
            path.unlink()

    with lock(path, lockf=late):
        assert len(attempts) == 2
        assert json.loads(path.read_text())["pid"] == os.getpid()
