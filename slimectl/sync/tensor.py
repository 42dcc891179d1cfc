"""New weights through memory that trainer and engines share: this machine's, or a GPU's."""

from __future__ import annotations

from functools import partial

import torch

from slimectl.ports import NamedTensors, Policy, WeightWorkers
from slimectl.sync.parts import cast, messages, named, to_the_end
from slimectl.sync.pushing import ServerSync
from slimectl.types import Metrics


class TensorSync(ServerSync):
    """Messages of about `buffer_bytes`, each in shared memory only until the engines have read it.

    `dtype` is the engines' precision: nothing wider is sent.
    """

    def __init__(
        self,
        policy: Policy,
        workers: WeightWorkers,
        *,
        pause_mode: str = "in_place",
        buffer_bytes: int = 512 * 2**20,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(policy, workers, pause_mode=pause_mode)
        self.buffer_bytes, self.dtype = buffer_bytes, dtype

    def _push(self, workers: WeightWorkers, version: str) -> Metrics:
        send = partial(_send, workers=workers, version=version, most_bytes=self.buffer_bytes, dtype=self.dtype)
        with self.paused(workers) as watch:
            sent = self.policy.hand_weights(send)
        return {"bytes": float(sent), "pause_time": watch.seconds}


def _send(
    tensors: NamedTensors, *, workers: WeightWorkers, version: str, most_bytes: int, dtype: torch.dtype | None
) -> int:
    """Where the weights are; the bytes that were sent."""
    sent = 0
    with to_the_end(tensors) as stream:
        for message, last in messages(cast(stream, dtype), most_bytes):
            workers.load_tensors(message, version=named(version, last=last))
            sent += sum(tensor.nbytes for _, tensor in message)
    return sent
