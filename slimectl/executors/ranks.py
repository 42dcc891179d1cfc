"""Rank processes on this machine, joined in one torch.distributed group and driven from their parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from slimectl.errors import DiedError
from slimectl.executors.driving import GRACE_S, PipedRanks
from slimectl.executors.outputs import log_files, redirect, tail
from slimectl.executors.rank import LOCALHOST, RankPipe, Seat, Serve, host_store, live


class LocalRanks(PipedRanks):
    """N processes that each call `build()` and serve requests; rank i reads them from its pipe.

    A rank ignores Ctrl-C (its parent decides), writes to stderr (or its file in `logs`) only, and exits when its parent
    is gone, however the parent died.
    """

    def __init__(
        self, serve: Serve, build: Callable[[], Any], *, ranks: int, logs: Path | None = None, living: int = 0
    ) -> None:
        super().__init__(ranks, log_files(logs, ranks, living))
        # The parent holds the store, so that its port is taken before any rank asks for it.
        self._store = host_store(LOCALHOST)
        spawn = multiprocessing.get_context("spawn")
        self._processes = []
        with _no_main_without_file():
            for rank in range(ranks):
                seat = Seat(rank, ranks, LOCALHOST, self._store.port, local=rank, neighbours=ranks, device=rank)
                driver_pipe, rank_pipe = spawn.Pipe()
                log = None if self._logs is None else self._logs[rank]
                process = spawn.Process(
                    target=_rank, args=(serve, build, seat, rank_pipe, log), daemon=True, name=f"slimectl-rank-{rank}"
                )
                process.start()
                rank_pipe.close()
                self._pipes.append(driver_pipe)
                self._processes.append(process)

    def _ended_ranks(self) -> Iterator[int]:
        return iter(())  # a process that ends closes its pipe

    def _death_error(self, rank: int) -> DiedError:
        process = self._processes[rank]
        process.join(GRACE_S)
        hint = "; out of memory?" if process.exitcode == -signal.SIGKILL else ""
        location = "its messages above" if self._logs is None else self._logs[rank]
        return DiedError(f"rank {rank} of {self.ranks} died (exit code {process.exitcode}{hint}); see {location}")

    def _tail(self, rank: int) -> str:
        return "" if self._logs is None else tail(self._logs[rank])

    def _reap(self, deadline: float) -> None:
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def _no_main_without_file() -> Iterator[None]:
    """Hide the file name of a main module that was read from stdin.

    Spawned processes import the main module again; this one has a name but no file to import.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or Path(file).exists():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


def _rank(serve: Serve, build: Callable[[], Any], seat: Seat, pipe: Connection, log: Path | None) -> None:
    """Main function of one rank process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    redirect(log)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    live(serve, build, RankPipe(pipe, seat.rank), seat)
    # At once: destroying a group whose other ranks are stuck or gone would wait for them.
    os._exit(0)


def _leave_with_parent() -> None:
    """Exit when the parent does, even in the middle of a collective call, where no pipe is read."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
