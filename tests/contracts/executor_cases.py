"""What executors carry in the contract suite; importable by name, so that other processes find it."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Source:
    """Counts in files what has been made of it, wherever that happens."""

    def __init__(self, folder: Path, *, length: int = 20, fails_at: int | None = None) -> None:
        self.folder, self.length, self.fails_at = folder, length, fails_at

    def __call__(self) -> Iterator[int]:
        try:
            for i in range(self.length):
                if i == self.fails_at:
                    raise ZeroDivisionError(f"item {i}")
                with (self.folder / "made").open("a") as file:
                    file.write("x")
                yield i
        finally:
            (self.folder / "ended").touch()

    @property
    def made(self) -> int:
        file = self.folder / "made"
        return file.stat().st_size if file.exists() else 0

    def settled(self, expected: int) -> int:
        """How many there are, once there are as many as expected and a carrier had the time to make more."""
        deadline = time.monotonic() + 10
        while self.made < expected and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.05)
        return self.made

    def has_ended(self) -> bool:
        deadline = time.monotonic() + 10
        while not (self.folder / "ended").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        return (self.folder / "ended").exists()


def negated(n: int) -> int:
    time.sleep(0.05 if n % 3 == 0 else 0.0)
    return -n


def process_of(_: int) -> int:
    """Return the worker's process."""
    return os.getpid()


def hangs_on_three(n: int) -> int:
    while n == 3:
        time.sleep(1)
    return n


def spins_on_three(n: int) -> int:
    while n == 3:
        pass
    return n


def waits_for_a_core(n: int) -> int:
    """As on a machine that has none to spare: time passes, CPU time does not."""
    time.sleep(0.5)
    return n


def prepares_slowly(n: int) -> None:
    """As the first import of a library does."""
    started = time.process_time()
    while time.process_time() - started < 0.5:
        pass


def spins_the_first_time(item: tuple[int, Path]) -> tuple[int, int]:
    """Return its number, and how many others were at work when number 3 was tried again."""
    n, folder = item
    (folder / f"busy-{n}").touch()
    if n == 3 and not (folder / "tried").exists():
        (folder / "tried").touch()
        while True:
            pass
    if n == 4:
        time.sleep(1.0)
    others = len([file for file in folder.glob("busy-*") if file.name != "busy-3"]) if n == 3 else 0
    (folder / f"busy-{n}").unlink()
    return n, others


def refuses_two_and_dies_on_five(n: int) -> int:
    if n == 2:
        raise ValueError("two")
    if n == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return n


def obey(build: Any, pipe: Any) -> None:
    """What every rank of the group tests does."""
    import torch
    import torch.distributed as dist

    offset, rank = build(), dist.get_rank()
    pipe.done(offset)
    while True:
        method, value = pickle.loads(pipe.recv_bytes())
        try:
            if method == "fail" and rank == value:
                raise ZeroDivisionError(f"rank {rank}")
            if method == "parts" and rank == 0:
                for i in range(value):
                    pipe.part(i)
            if method == "die" and rank == value:
                print("last words", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if method == "threads":
                pipe.done(torch.get_num_threads())
                continue
            total = torch.tensor(float(offset + rank))
            if method in ("sum", "die"):
                dist.all_reduce(total)
            pipe.done(total.item())
        except Exception as error:
            pipe.failed(error)


def ten() -> int:
    return 10


def broken() -> int:
    raise LookupError("no such thing")


class Counter:
    """State, refusals, and a generator that sees what other calls do in its midst."""

    def __init__(self, start: int, closed: Path | None = None) -> None:
        self.value, self.closed = start, closed

    def add(self, amount: int) -> int:
        if amount < 0:
            raise ValueError(f"{amount} is negative")
        self.value += amount
        return self.value

    def add_all(self, amounts: Iterator[int]) -> int:
        for amount in amounts:
            self.value += amount
        return self.value

    def values(self, count: int, *, scale: int = 1) -> Iterator[int]:
        for _ in range(count):
            yield scale * self.value

    def of(self, other: Any) -> int:
        return other.add(0)

    def process(self) -> int:
        return os.getpid()

    def leave(self) -> None:
        os._exit(1)

    def close(self) -> None:
        if self.closed is not None:
            self.closed.touch()
