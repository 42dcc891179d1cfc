"""Rank processes on this machine, joined in one torch.distributed group and driven from their parent.

Every call goes to all ranks; each answers with messages on its own pipe: ("part", …)* then ("done", …) or ("error", …).
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
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from slimectl.errors import BackendError, SlimectlError

GRACE_S = 10.0
"""How long ranks get to answer after another has failed, or to leave after being asked."""

Serve = Callable[[Callable[[], Any], Connection], None]


class LocalRanks:
    """N processes that each built `build()` and obey; rank i reads requests from its pipe.

    A rank ignores Ctrl-C (its parent decides), writes to stderr only, and exits when its parent is gone, however the
    parent died. After a failure that leaves some rank waiting for another, the processes are ended.
    """

    def __init__(self, serve: Serve, build: Callable[[], Any], *, ranks: int) -> None:
        from torch.distributed import TCPStore

        # The parent holds the store, so that its port is taken before any rank asks for it.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        with _no_main_without_file():
            for rank in range(ranks):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(
                    target=_rank, args=(serve, build, rank, ranks, self._store.port, theirs), daemon=True,
                    name=f"slimectl-rank-{rank}",
                )  # fmt: skip
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    def send(self, *request: Any) -> None:
        """Send one request to every rank. Raises BackendError if the group has ended."""
        data = pickle.dumps(request)
        try:
            for pipe in self._pipes:
                pipe.send_bytes(data)
        except OSError as error:
            raise self._death() from error
        if not self._pipes:
            raise BackendError("the rank processes have ended; build the policy again")

    def answers(self) -> Iterator[Any]:
        """The parts that rank 0 sends, then its result; every rank has answered once this is exhausted.

        Raises what a rank raised, with its traceback as a note, or BackendError if one died.
        """
        pending = dict(enumerate(self._pipes))
        failure: BaseException | None = None
        deadline = float("inf")
        while pending:
            left = None if failure is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(pending.values()), timeout=left)
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                try:
                    kind, value = pending[rank].recv()
                except (EOFError, OSError):
                    kind, value = "error", self._death(rank)
                    deadline = 0.0
                if kind != "part":
                    del pending[rank]
                if kind == "error" and failure is None:
                    failure, deadline = value, min(deadline, time.monotonic() + GRACE_S)
                elif rank == 0 and failure is None:
                    yield value
            if not ready:
                break
        if failure is not None:
            if pending or deadline == 0.0:
                self.end(polite=False)
            raise failure

    def end(self, *, polite: bool = True) -> None:
        """Let every rank leave, or make it."""
        deadline = time.monotonic() + (GRACE_S if polite else 0.0)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes = []

    def _death(self, rank: int | None = None) -> BackendError:
        if rank is None:
            rank = next((i for i, process in enumerate(self._processes) if not process.is_alive()), 0)
        process = self._processes[rank]
        process.join(GRACE_S)
        cause = "; out of memory?" if process.exitcode == -signal.SIGKILL else ""
        return BackendError(
            f"rank {rank} of {len(self._processes)} died (exit code {process.exitcode}{cause}); see its messages above"
        )


@contextlib.contextmanager
def _no_main_without_file() -> Iterator[None]:
    """Spawned processes import the main module again; one read from stdin has a name but no file to import."""
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


def _rank(serve: Serve, build: Callable[[], Any], rank: int, ranks: int, port: int, pipe: Connection) -> None:
    """The life of one rank process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        _join_group(rank, ranks, port)
        serve(build, pipe)
    except EOFError:
        pass  # the parent closed the pipe
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(("error", portable(error, rank)))
    # At once: destroying a group whose other ranks are stuck or gone would wait for them.
    sys.stderr.flush()
    os._exit(0)


def _leave_with_parent() -> None:
    """Exit even in the middle of a collective call, where no pipe is read."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _join_group(rank: int, ranks: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // ranks))
    if Path("/sys/class/net/lo").exists():
        # gloo would look up the host's own name, which containers often cannot resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def portable(error: BaseException, rank: int) -> BaseException:
    """The exception as it can travel: of its own type where that can be pickled, its traceback as a note."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        travelled = pickle.loads(pickle.dumps(error.with_traceback(None)))
    except Exception:
        travelled = SlimectlError(f"rank {rank}: {type(error).__name__}: {error}")
    travelled.add_note(f"on rank {rank}:\n{text}")
    return travelled
