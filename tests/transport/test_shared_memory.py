"""A block of shared memory goes with its owner, or with the next process that looks, however its owner ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, cast

import pytest

from slimectl.errors import StorageError
from slimectl.protocols import Policy
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.system import shared_memory
from slimectl.system.shared_memory import FOLDER, PREFIX, SharedMemoryFile, remove_orphans

OWNER = """
import sys
from slimectl.system.shared_memory import SharedMemoryFile
print(SharedMemoryFile(64).memory.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process of a group of its own that has a block, and the block's file."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        yield process, FOLDER / process.stdout.readline().strip()


def test_the_block_of_a_killed_group_is_removed_by_the_next_process(owner: tuple[subprocess.Popen[str], Path]):
    process, block = owner
    remove_orphans()
    assert block.exists()  # in use
    os.killpg(process.pid, signal.SIGKILL)  # with multiprocessing's resource tracker, which removes it otherwise
    process.wait()
    assert block.exists()
    remove_orphans()
    assert not block.exists()


def test_a_block_in_use_stays_though_its_owner_opens_and_closes_it_again():
    block = SharedMemoryFile(64)
    file = FOLDER / block.memory.name
    file.read_bytes()
    remove_orphans()
    assert file.exists()
    block.close()
    assert not file.exists()


def test_what_is_no_block_stays(tmp_path: Path):
    link, pipe = (FOLDER / f"{PREFIX}{os.getpid()}_{kind}" for kind in ("link", "pipe"))
    link.symlink_to(tmp_path)
    os.mkfifo(pipe)
    try:
        remove_orphans()
        assert link.is_symlink()
        assert pipe.is_fifo()
    finally:
        link.unlink()
        pipe.unlink()


def test_a_block_that_is_removed_before_it_is_locked_is_made_again(monkeypatch: pytest.MonkeyPatch):
    """Another process may look for orphans right after the file is created."""
    names: list[str] = []

    def create(name: str, **options: Any) -> SharedMemory:
        memory = SharedMemory(name, **options)
        if not names:
            remove_orphans()
            assert not (FOLDER / name).exists()
        names.append(name)
        return memory

    monkeypatch.setattr("slimectl.system.shared_memory.SharedMemory", create)
    block = SharedMemoryFile(64)
    try:
        assert len(names) == 2
        assert block.memory.name == names[1]
        assert (FOLDER / names[1]).stat().st_size == 64
    finally:
        block.close()


def test_a_folder_that_is_mounted_read_only_is_one_line(monkeypatch: pytest.MonkeyPatch):
    # Root, which tests may be, may write everywhere else: what access(2) answers for a read-only mount.
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/dev/shm")
    with pytest.raises(StorageError, match=r"^/dev/shm: Read-only file system\. .* or set sync\.transport=disk$"):
        shared_memory.check_writable()


@pytest.mark.parametrize(("writable", "transport"), [(True, "TensorSync"), (False, "DistributedSync")])
def test_auto_needs_no_shared_memory_in_a_folder_that_is_mounted_read_only(
    writable: bool, transport: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_dir: Callable[[], Path]
):
    monkeypatch.setattr(os, "access", lambda path, mode: writable or str(path) != "/dev/shm")
    settings = Settings.model_validate({"engine": {"backend": "vllm", "device": "cpu"}})
    workers = builders.workers(settings, ["http://127.0.0.1:1"])
    sync = builders.to_servers(settings, cast(Policy, None), workers, model=model_dir(), folder=tmp_path)
    assert type(sync).__name__ == transport
