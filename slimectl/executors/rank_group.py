"""Drives a rank group over one pipe per rank. Requests go to every rank, and each rank answers.

A rank answers a request with ("part", …)* and then ("done", …) or ("error", …). Only rank 0's are kept.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from slimectl.errors import DiedError
from slimectl.executors.child_processes import (
    attach_log_tail,
    blocked_in_helpers,
    leave_to_parent,
    log_files,
    redirect,
    tail,
)
from slimectl.executors.rank_process import LOCALHOST, ConnectionPipe, RankInfo, host_store, run_rank
from slimectl.protocols import Serve
from slimectl.system.liveness import note_progress
from slimectl.system.loopback import short_temporary_folders

GRACE_S = 10.0
"""Seconds that ranks get to answer after another rank has failed, or to exit after a request to exit."""
LOOK_S = 2.0
"""Seconds between checks for dead ranks, because a pipe does not always report the end of its process."""
PRELOAD = ["slimectl.executors.rank_imports"]
"""Module that the fork server imports once for all ranks."""


class RankGroupBase:
    """Driver side of protocols.RankGroup. A subclass starts the processes and explains how they ended.

    After a failure that leaves some rank waiting for another, the processes are ended.
    """

    def __init__(self, ranks: int, logs: list[Path] | None) -> None:
        self.ranks = ranks
        self.ended = False
        self._logs = logs
        self._pipes: list[Connection] = []

    def send(self, *request: Any) -> None:
        """Send one request to every rank. Raises DiedError if the group has ended."""
        if self.ended:
            raise DiedError("the rank processes have ended. Build the policy again.")
        data = pickle.dumps(request)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(data)
            except OSError as error:
                raise self._death_error(rank) from error

    def answers(self) -> Iterator[Any]:
        """Yield the parts that rank 0 sends, then its result. Every rank has answered once this is exhausted.

        Raises what a rank raised, with its traceback as a note, or DiedError if one died: a death is the cause of
        what other ranks raise.
        """
        pending = dict(enumerate(self._pipes))
        failure: BaseException | None = None
        deadline = float("inf")
        while pending and time.monotonic() <= deadline:
            for rank, kind, value in self._receive(pending, deadline):
                if kind != "part":
                    del pending[rank]
                if kind == "died":
                    if not isinstance(failure, DiedError):
                        failure = value
                    deadline = 0.0
                elif kind == "error" and failure is None:
                    failure, deadline = attach_log_tail(value, self._tail(rank)), time.monotonic() + GRACE_S
                elif kind != "error" and rank == 0 and failure is None:
                    yield value
        if failure is not None:
            if pending or deadline == 0.0:
                self.end(polite=False)
            raise failure

    def end(self, *, polite: bool = True) -> None:
        """Close the pipes, so that every rank exits. Without `polite`, kill the processes at once."""
        if self.ended:
            return
        self.ended = True
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        self._pipes = []
        self._reap(time.monotonic() + (GRACE_S if polite else 0.0))

    def _receive(self, pending: dict[int, Connection], deadline: float) -> Iterator[tuple[int, str, Any]]:
        """Wait for messages and yield (rank, kind, value) of each."""
        ready = wait(list(pending.values()), timeout=min(LOOK_S, max(0.0, deadline - time.monotonic())))
        ready_ranks = [rank for rank, pipe in pending.items() if pipe in ready]
        for rank in ready_ranks:
            note_progress()
            try:
                yield rank, *pending[rank].recv()
            except (EOFError, OSError):
                yield rank, "died", self._death_error(rank)
        if not ready_ranks:
            for rank in set(self._ended_ranks()) & set(pending):
                yield rank, "died", self._death_error(rank)

    def _death_error(self, rank: int) -> DiedError:
        """Return the error for a rank whose pipe has closed, with the tail of its log as a note."""
        place = "its messages above" if self._logs is None else self._logs[rank]
        error = DiedError(f"rank {rank} of {self.ranks} died ({self._ending(rank)}). See {place}.")
        return attach_log_tail(error, self._tail(rank))

    def _tail(self, rank: int) -> str:
        """Return the last lines of a rank's log below its name, or "" without logs."""
        raise NotImplementedError

    def _ended_ranks(self) -> Iterator[int]:
        """Yield the ranks that are known to have ended."""
        raise NotImplementedError

    def _ending(self, rank: int) -> str:
        """Wait for the end of a rank whose pipe has closed, and describe it."""
        raise NotImplementedError

    def _reap(self, deadline: float) -> None:
        """Wait for the processes until `deadline`, then kill the remaining ones."""
        raise NotImplementedError


class LocalRanks(RankGroupBase):
    """N processes that each call `build()` and serve requests. Rank i reads its requests from its pipe.

    A rank ignores Ctrl-C, SIGTERM and SIGHUP (its parent decides), writes to stderr (or its file in `logs`) only, and
    exits when its parent is gone, however the parent died.
    """

    def __init__(
        self, serve: Serve, build: Callable[[], Any], *, ranks: int, logs: Path | None = None, living: int = 0
    ) -> None:
        super().__init__(ranks, log_files(logs, ranks, living))
        # The parent hosts the store, so that its port is bound before any rank connects.
        self._store = host_store(LOCALHOST)
        # A server that has only imported modules: forking this process, with torch's threads, can deadlock.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._processes = []
        with _no_main_without_file(), blocked_in_helpers(), short_temporary_folders():
            for rank in range(ranks):
                seat = RankInfo(rank, ranks, LOCALHOST, self._store.port, local=rank, neighbours=ranks, device=rank)
                driver_pipe, rank_pipe = context.Pipe()
                log = None if self._logs is None else self._logs[rank]
                process = context.Process(
                    target=_rank,
                    args=(serve, build, seat, rank_pipe, log, dict(os.environ)),
                    daemon=True,
                    name=f"slimectl-rank-{rank}",
                )
                process.start()
                rank_pipe.close()
                self._pipes.append(driver_pipe)
                self._processes.append(process)

    def _ended_ranks(self) -> Iterator[int]:
        return iter(())  # a process that ends closes its pipe

    def _ending(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(GRACE_S)
        hint = "; out of memory?" if process.exitcode == -signal.SIGKILL else ""
        return f"exit code {process.exitcode}{hint}"

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

    New processes import the main module again, and this one has a name but no file to import.
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


def _rank(
    serve: Serve,
    build: Callable[[], Any],
    seat: RankInfo,
    pipe: Connection,
    log: Path | None,
    environment: Mapping[str, str],
) -> None:
    """Run one rank process with the driver's current `environment`. The fork server still has an earlier one."""
    os.environ.clear()
    os.environ.update(environment)
    leave_to_parent()
    redirect(log)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    run_rank(serve, build, ConnectionPipe(pipe, seat.rank), seat)
    # Exit at once: destroying a group whose other ranks are stuck or gone would wait for them.
    os._exit(0)


def _leave_with_parent() -> None:
    """Exit when the parent does, even during a collective call, when nothing reads the pipe."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
