"""Weight sync by broadcast: the trainer's rank 0 and every engine rank in one process group."""

from __future__ import annotations

from functools import partial
from uuid import uuid4

import torch

from slimectl.ports import NamedTensors, Policy, WeightWorkers
from slimectl.sync.broadcast import broadcast, leave
from slimectl.sync.parts import cast, messages, named, to_the_end
from slimectl.sync.pushing import ServerSync
from slimectl.types import Metrics


class DistributedSync(ServerSync):
    """Broadcasts by gloo from a CPU, nccl from a GPU; `timeout_s` bounds joining, and each message of `buffer_bytes`.

    The first push creates the group, in the process that has the weights, and later pushes reuse it; it is recreated
    after a failure and when the workers change. A push to some workers alone uses a temporary group.
    """

    def __init__(
        self,
        policy: Policy,
        workers: WeightWorkers,
        *,
        pause_mode: str = "in_place",
        buffer_bytes: int = 512 * 2**20,
        dtype: torch.dtype | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(policy, workers, pause_mode=pause_mode)
        self.buffer_bytes, self.dtype, self.timeout_s = buffer_bytes, dtype, timeout_s
        self._key = f"slimectl-{uuid4().hex[:8]}"

    def _push(self, workers: WeightWorkers, version: str) -> Metrics:
        alone = list(workers.urls) != list(self.workers.urls)
        send = partial(
            _send, workers=workers, key=f"{self._key}-alone" if alone else self._key, keep=not alone, version=version,
            most_bytes=self.buffer_bytes, dtype=self.dtype, timeout_s=self.timeout_s,
        )  # fmt: skip
        with self.paused(workers) as watch:
            sent = self.policy.hand_weights(send)
        return {"bytes": float(sent), "pause_time": watch.seconds}

    def close(self) -> None:
        """Destroy the group on both sides; a policy that has ended has destroyed it already."""
        self.policy.hand_weights(partial(_leave, key=self._key))


def _send(
    tensors: NamedTensors,
    *,
    workers: WeightWorkers,
    key: str,
    keep: bool,
    version: str,
    most_bytes: int,
    dtype: torch.dtype | None,
    timeout_s: float,
) -> int:
    """Broadcast the tensors, in the process that has the weights; returns the bytes sent to each worker."""
    sent, done = 0, False
    with to_the_end(tensors) as stream:
        try:
            for message, last in messages(cast(stream, dtype), most_bytes):
                broadcast(message, workers, key=key, version=named(version, last=last), timeout_s=timeout_s)
                sent += sum(tensor.nbytes for _, tensor in message)
            done = True
        finally:
            if not (done and keep):
                leave(key)
    return sent


def _leave(tensors: NamedTensors, *, key: str) -> None:
    with to_the_end(tensors):
        leave(key)
