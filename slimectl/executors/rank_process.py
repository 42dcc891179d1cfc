"""Rank side of a rank group: the pipe, the torch.distributed initialization and the main loop."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from slimectl.errors import SlimectlError
from slimectl.protocols import RankPipe, Serve
from slimectl.system.listening import interface
from slimectl.system.liveness import expose, own_stacks

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class RankInfo:
    """Position of a rank: its index among `ranks`, the store for the rendezvous, and its machine.

    `neighbours` ranks are on the same machine, and this one is number `local` of them. `device` is the index of its GPU
    among the visible ones. `address` is the machine's own.
    """

    rank: int
    ranks: int
    host: str
    port: int
    local: int
    neighbours: int
    device: int
    address: str = LOCALHOST


class ConnectionPipe:
    """protocols.RankPipe over a connection. Ends the rank without an error when the driver is gone."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self._connection, self._rank = connection, rank

    def recv_bytes(self) -> bytes:
        """Return the next request, pickled."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise _DriverGone from None

    def part(self, value: Any) -> None:
        """Send one part of a result."""
        self._connection.send(("part", value))

    def done(self, value: Any) -> None:
        """Send the result of a request or of the build."""
        self._connection.send(("done", value))

    def failed(self, error: BaseException) -> None:
        """Send the exception of a request or of the build."""
        self._connection.send(("error", picklable_error(error, f"rank {self._rank}")))


class _DriverGone(Exception):
    pass


def run_rank(serve: Serve, build: Callable[[], Any], pipe: RankPipe, seat: RankInfo) -> None:
    """Join the group and serve until the pipe closes. An exception is sent to the driver."""
    faulthandler.enable()  # a crash in native code prints the Python stack into the rank's log
    expose(f"rank {seat.rank}", describe=lambda: own_stacks() + _pending_operations())
    try:
        _join(seat)
        serve(build, pipe)
    except _DriverGone:
        pass
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.failed(error)
    sys.stderr.flush()


def _join(seat: RankInfo) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(seat.ranks),
        "LOCAL_RANK": str(seat.local),
        "LOCAL_WORLD_SIZE": str(seat.neighbours),
        "MASTER_ADDR": seat.host,
        "MASTER_PORT": str(seat.port),
    }
    # Set explicitly: a forked rank has the fork server's OpenMP library, which read an earlier environment.
    torch.set_num_threads(_threads(os.environ.get("OMP_NUM_THREADS", ""), torch.get_num_threads(), seat.neighbours))
    # gloo would look up the host's own name, which containers often cannot resolve.
    if name := interface("127.0.0.1" if seat.neighbours == seat.ranks else seat.address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(seat.device)
        backend = "cpu:gloo,cuda:nccl"
    store = dist.TCPStore(seat.host, seat.port, is_master=False)
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.ranks)


def _threads(variable: str, available: int, neighbours: int) -> int:
    """Return the number of threads of a rank: OMP_NUM_THREADS, else its share of what torch would use.

    The number of threads decides how sums are split, and so the last digits of every metric. A single rank must use as
    many as the same policy in this process.

    >>> _threads("", 8, neighbours=2), _threads("3", 8, neighbours=2), _threads("4,2", 8, neighbours=1)
    (4, 3, 4)
    """
    outermost = variable.partition(",")[0].strip()  # the rest is for nested parallel regions
    return int(outermost) if outermost.isdecimal() and int(outermost) else max(1, available // neighbours)


def _pending_operations() -> str:
    """Return a line for every collective operation that torch's flight recorder has not seen end, oldest first.

    On a GPU, stacks do not show them: the host waits for the device later.
    """
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return ""
    with contextlib.suppress(Exception):  # it is not part of torch's interface
        entries = [entry for entry in json.loads(dump(True, False)).get("entries", ()) if not entry["retired"]]
        return "".join(
            f"Operation {entry['collective_seq_id']} of {entry['process_group'][-1]}: "
            f"{entry['profiling_name'].partition(':')[2]} of {entry['input_sizes']}\n"
            for entry in entries
        )
    return ""


def host_store(host: str) -> TCPStore:
    """Return a store that listens only on `host`, at a free port.

    By default torch (2.13) listens on every address of the machine, and any client that reaches a store can read,
    change and stop what the ranks agree on.
    """
    from torch.distributed import TCPStore

    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    # Only the libuv backend accepts a descriptor. The store closes it.
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, use_libuv=True, master_listen_fd=listener.detach()
    )


def picklable_error(error: BaseException, source: str) -> BaseException:
    """Return the exception in picklable form, of its own type if that can be pickled, with its traceback as a note.

    `remote_frames` lists the file and line of every frame, as a local traceback would (user_code.error_location).
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    try:
        picklable: BaseException = pickle.loads(pickle.dumps(error.with_traceback(None)))
    except Exception:
        picklable = SlimectlError(f"{source}: {type(error).__name__}: {error}")
    picklable.add_note(f"on {source}:\n{text}")
    picklable.remote_frames = frames  # type: ignore[attr-defined]
    return picklable
