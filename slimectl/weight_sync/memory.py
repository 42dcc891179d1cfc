"""Weight sync through memory: into the engine of this process, or memory shared with servers of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain

from torch import Tensor

from slimectl.protocols import MessageMemory, NamedTensors, Policy, WeightReceiver, WeightUpdateClient
from slimectl.types import Metrics
from slimectl.weight_sync.base import (
    Message,
    Precision,
    WeightSyncBase,
    buckets,
    cast,
    drained,
    in_progress_version,
    targets,
)


class InProcessSync:
    """protocols.WeightSync into one engine, under the policy's version."""

    def __init__(self, policy: Policy, engine: WeightReceiver) -> None:
        self.policy = policy
        self.engine = engine

    def push(self) -> Metrics:
        """Load the weights into the engine; reports the bytes that it read. It samples nothing meanwhile."""
        sizes: list[int] = []

        def counted_weights() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.policy.weights():
                sizes.append(tensor.nbytes)
                yield name, tensor

        started = time.perf_counter()
        self.engine.load_weights(counted_weights(), version=self.policy.weight_version)
        return {"bytes": float(sum(sizes)), "pause_time": time.perf_counter() - started}

    def push_to(self, workers: WeightUpdateClient) -> Metrics:
        """Restore nothing: the engine starts and ends with its process."""
        return {"bytes": 0.0, "pause_time": 0.0}

    def sleep(self) -> None:
        """Do nothing: the engine keeps its memory."""

    def wake(self) -> None:
        """Do nothing: the engine has kept its memory."""

    def close(self) -> None:
        """Do nothing: no resource outlives the process."""


ON_CPU_BYTES = 64 * 2**20
"""Size limit of a message on a CPU that does not go through shared memory: more would only touch more memory."""


class TensorSync(WeightSyncBase):
    """Sends messages of at most `buffer_bytes`, through shared memory that the process keeps for the next push.

    `dtype` is the engines' precision: nothing wider is sent, and the cast is written where the engines read it.
    """

    def __init__(
        self,
        policy: Policy,
        workers: WeightUpdateClient,
        *,
        pause_mode: str = "in_place",
        buffer_bytes: int = 512 * 2**20,
        dtype: Precision = None,
    ) -> None:
        super().__init__(policy, workers, pause_mode=pause_mode)
        self.buffer_bytes, self.dtype = buffer_bytes, dtype

    def _push(self, workers: WeightUpdateClient, version: str) -> Metrics:
        send = partial(_send, workers=workers, version=version, most_bytes=self.buffer_bytes, dtype=self.dtype)
        with self.paused(workers) as watch:
            sent = self.policy.consume_weights(send)
        return {"bytes": float(sent), "pause_time": watch.seconds}

    def close(self) -> None:
        self.workers.release_memory()


def _send(
    tensors: NamedTensors, *, workers: WeightUpdateClient, version: str, most_bytes: int, dtype: Precision
) -> int:
    """Send the tensors, in the process that has the weights; returns the bytes sent."""
    sent = 0
    with drained(tensors) as stream:
        first = next(stream, None)
        if first is None:
            return 0
        with nullcontext(None) if first[1].is_cuda else workers.message_memory(most_bytes) as memory:
            stream = chain([first], stream)
            if memory is not None:
                messages = _shared_messages(stream, dtype, memory)
            else:
                on_cpu = not first[1].is_cuda
                messages = buckets(cast(stream, dtype), min(most_bytes, ON_CPU_BYTES) if on_cpu else most_bytes)
            for message, last in messages:
                workers.load_tensors(message, version=in_progress_version(version, last=last))
                sent += sum(tensor.nbytes for _, tensor in message)
    return sent


def _shared_messages(
    tensors: NamedTensors, precision: Precision, memory: MessageMemory
) -> Iterator[tuple[Message, bool]]:
    """Cast tensors into `memory`, in messages like those of `buckets`: each is sent before the next one begins."""
    message: Message = []
    size = 0
    for name, tensor, dtype in targets(tensors, precision):
        nbytes = tensor.numel() * dtype.itemsize
        if message and size + nbytes > memory.size:
            yield message, False
            message, size = [], 0
        message.append((name, memory.empty(tuple(tensor.shape), dtype).copy_(tensor)))
        size += nbytes
    if message:
        yield message, True
