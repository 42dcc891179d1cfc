"""Weight sync through memory: into the engine of this process, or memory shared with servers of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import chain

from torch import Tensor

from slimectl.protocols import NamedTensors, Policy, WeightReceiver, WeightUpdateClient
from slimectl.types import Metrics
from slimectl.weight_sync.base import Precision, WeightSyncBase, buckets, cast, drained, in_progress_version


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
"""Size limit of a message on a CPU, where no GPU transfer has to be filled: more would only touch more memory."""


class TensorSync(WeightSyncBase):
    """Sends messages of at most `buffer_bytes`, in shared memory only until the engines have read the last.

    `dtype` is the engines' precision: nothing wider is sent.
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


def _send(
    tensors: NamedTensors, *, workers: WeightUpdateClient, version: str, most_bytes: int, dtype: Precision
) -> int:
    """Send the tensors, in the process that has the weights; returns the bytes sent."""
    sent = 0
    with drained(tensors) as stream:
        first = next(stream, None)
        if first is not None and not first[1].is_cuda:
            most_bytes = min(most_bytes, ON_CPU_BYTES)
        all_tensors = stream if first is None else chain([first], stream)
        for message, last in buckets(cast(all_tensors, dtype), most_bytes):
            workers.load_tensors(message, version=in_progress_version(version, last=last))
            sent += sum(tensor.nbytes for _, tensor in message)
    return sent
