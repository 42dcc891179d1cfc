"""Pushes weights to engines by gloo or NCCL broadcast, from the process that has the weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
import torch.distributed as dist

from slimectl.engines.weight_sync.base import (
    Message,
    MessageSync,
    Precision,
    buckets,
    cast,
    drained,
    in_progress_version,
)
from slimectl.engines.weight_sync.process_groups import host_store, join, start_broadcast
from slimectl.errors import BackendError, SlimectlError, first_line
from slimectl.protocols import NamedTensors, WeightUpdateClient
from slimectl.system.listening import address_towards
from slimectl.types import Metrics

JOIN_TIMEOUT_S = 120.0
LOOK_S = 0.005
"""Seconds between polls of a broadcast."""
AGREE_S = 5.0
"""Seconds that the other side of a failed broadcast gets to report the reason."""


@dataclass(slots=True)
class TrainerGroup:
    """One process group and its resources. `name` is never reused, because engines may still have an older group."""

    name: str
    workers: WeightUpdateClient
    store: Any
    backend: Any
    pending: list[Any] = field(default_factory=list)


_GROUPS: dict[str, TrainerGroup] = {}
"""Groups of this process, which outlive the pushes that created them."""
_ABANDONED: list[TrainerGroup] = []
"""Groups whose broadcast still waits for an engine. Destroying one would also wait, with the GIL held."""


def broadcast(message: Message, workers: WeightUpdateClient, *, key: str, version: str, timeout_s: float) -> None:
    """Send the tensors to every worker in the group `key`, which is created if missing or if its members differ.

    Raises BackendError as soon as a worker refuses.
    """
    group = _GROUPS.get(key)
    if group is None or list(group.workers.urls) != list(workers.urls):
        leave(key)
        on_gpu = message[0][1].is_cuda
        group = _GROUPS[key] = _join_group(workers, key, backend="nccl" if on_gpu else "gloo", timeout_s=timeout_s)
    # Wide numbers first, so that each tensor begins at a multiple of its own width.
    ordered = sorted(message, key=lambda named: -named[1].element_size())
    forms = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered]
    flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in ordered])
    received = _in_background(partial(workers.load_broadcast, forms, name=group.name, version=version))
    work = start_broadcast(group.backend, flat, timedelta(seconds=timeout_s))
    group.pending = [work]
    _finish(work, received, timeout_s)


def leave(key: str) -> None:
    """Destroy the group on both sides, the engines' first, so that operations here that wait for them fail."""
    group = _GROUPS.pop(key, None)
    if group is not None:
        with suppress(SlimectlError):
            group.workers.leave(name=group.name)
        _ABANDONED.append(group)
    _ABANDONED[:] = [
        abandoned for abandoned in _ABANDONED if not all(work.is_completed() for work in abandoned.pending)
    ]


def own_address(urls: Sequence[str]) -> str:
    """Return the address at which workers reach this machine, or the loopback if all of them are on it."""
    hosts = [urlsplit(url).hostname or "" for url in urls]
    remote_hosts = [host for host in hosts if host not in ("localhost", "::1") and not host.startswith("127.")]
    if not remote_hosts:
        return "127.0.0.1"
    try:
        return address_towards(remote_hosts[0])
    except OSError as error:
        raise BackendError(
            f"engine at {remote_hosts[0]}: no route from here ({error}). Use sync.transport disk."
        ) from error


def _join_group(workers: WeightUpdateClient, key: str, *, backend: str, timeout_s: float) -> TrainerGroup:
    """Create a group of this process, rank 0, and the workers' ranks."""
    host, name, world = own_address(workers.urls), f"{key}-{uuid4().hex[:8]}", 1 + sum(workers.ranks)
    limit = timedelta(seconds=min(timeout_s, JOIN_TIMEOUT_S))
    store = host_store(host, limit)
    client_store = dist.TCPStore(host, store.port, is_master=False, wait_for_workers=False, timeout=limit)
    own_join = _in_background(partial(join, backend, client_store, 0, world, name=name, timeout=limit, address=host))
    worker_joins = _in_background(
        partial(workers.join, host=host, port=store.port, world=world, name=name, backend=backend)
    )
    done, _ = wait_for([own_join, worker_joins], return_when="FIRST_EXCEPTION")
    failure = next(
        (future.exception() for future in (worker_joins, own_join) if future in done and future.exception()), None
    )
    if failure is not None:
        # Without its store, neither side waits for the other any longer.
        del store
        with suppress(SlimectlError):
            workers.leave(name=name)
        raise _explain(failure, worker_joins)
    return TrainerGroup(name, workers, (store, client_store), own_join.result())


def _finish(work: Any, received: Future[None], timeout_s: float) -> None:
    """Wait for both sides. If one fails, wait only until the other has reported the reason."""
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if received.done():
            received.result()
        if time.monotonic() > deadline:
            raise _too_slow(timeout_s)
        wait_for([received], timeout=LOOK_S)
        if received.done():
            time.sleep(LOOK_S)
    try:
        work.wait()
    except Exception as error:
        raise _explain(error, received) from error
    wait_for([received], timeout=max(0.0, deadline - time.monotonic()))
    if not received.done():
        raise _too_slow(timeout_s)
    received.result()


def _too_slow(timeout_s: float) -> BackendError:
    return BackendError(f"engines have not received a message of weights within {timeout_s:g} s. See their logs.")


def _explain(failure: BaseException, workers_done: Future[None]) -> BaseException:
    """Return the workers' error if they reported one, else one line of torch's, whose messages mention only sockets."""
    wait_for([workers_done], timeout=AGREE_S)
    workers_error = workers_done.exception() if workers_done.done() else None
    if isinstance(workers_error, SlimectlError):
        return workers_error
    if isinstance(failure, SlimectlError):
        return failure
    return BackendError(f"broadcasting weights failed: {first_line(failure)}. Has an engine died? See its log.")


def _in_background(call: Callable[[], Any]) -> Future[Any]:
    """Run the call in a daemon thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


@dataclass(eq=False)
class DistributedSync(MessageSync):
    """Broadcasts with gloo from a CPU, NCCL from a GPU. `timeout_s` limits joining and each message.

    The first push creates the group, in the process that has the weights, and later pushes reuse it. It is recreated
    after a failure and when the workers change. A push to only some of the workers uses a temporary group.
    """

    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        self._key = f"slimectl-{uuid4().hex[:8]}"

    def _push(self, workers: WeightUpdateClient, version: str) -> Metrics:
        subset = list(workers.urls) != list(self.workers.urls)
        send = partial(
            _send, key=f"{self._key}-alone" if subset else self._key, keep=not subset, version=version,
            most_bytes=self.buffer_bytes, timeout_s=self.timeout_s,
        )  # fmt: skip
        return self._push_by(send, workers)

    def close(self) -> None:
        """Destroy the group on both sides. A policy that has ended has already destroyed it."""
        self.policy.consume_weights(partial(_leave, key=self._key))


def _send(
    tensors: NamedTensors,
    *,
    workers: WeightUpdateClient,
    key: str,
    keep: bool,
    version: str,
    most_bytes: int,
    dtype: Precision,
    timeout_s: float,
) -> int:
    """Broadcast the tensors, in the process that has the weights. Returns the bytes sent to each worker."""
    sent, done = 0, False
    with drained(tensors) as stream:
        try:
            for message, last in buckets(cast(stream, dtype), most_bytes):
                broadcast(
                    message, workers, key=key, version=in_progress_version(version, last=last), timeout_s=timeout_s
                )
                sent += sum(tensor.nbytes for _, tensor in message)
            done = True
        finally:
            if not (done and keep):
                leave(key)
    return sent


def _leave(tensors: NamedTensors, *, key: str) -> None:
    with drained(tensors):
        leave(key)
