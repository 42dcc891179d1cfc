"""Weight sync through memory that is shared with servers on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from slimectl.engines.weight_sync.base import (
    Message,
    MessageSync,
    Precision,
    buckets,
    cast,
    drained,
    in_progress_version,
    targets,
)
from slimectl.protocols import MessageMemory, NamedTensors, RankConsumers, WeightUpdateClient
from slimectl.types import Metrics

ON_CPU_BYTES = 64 * 2**20
"""Size limit of a CPU message that does not use shared memory. Larger messages would only touch more memory."""


@dataclass(eq=False)
class TensorSync(MessageSync):
    """Sends messages through shared memory that the process keeps for the next push.

    The cast to the engines' precision writes directly to where the engines read, so nothing wider is sent.
    """

    rank_of: Callable[[str], int] | None = None
    """Rank that shares the GPU of the engine at an address, and sends to it: an engine sees no other GPU. Without it,
    the first rank sends to all engines."""

    def _push(self, workers: WeightUpdateClient, version: str) -> Metrics:
        return self._push_by(partial(_send, version=version, most_bytes=self.buffer_bytes), workers)

    def _consumer(self, send: Callable[..., int], workers: WeightUpdateClient) -> Callable[[Any], int]:
        urls_by_rank: dict[int, list[str]] = defaultdict(list)
        for url in workers.urls:
            urls_by_rank[self.rank_of(url) if self.rank_of else 0].append(url)
        if set(urls_by_rank) <= {0}:  # or no engine at all
            return super()._consumer(send, workers)
        return RankConsumers({rank: partial(send, workers=workers.only(urls)) for rank, urls in urls_by_rank.items()})

    def close(self) -> None:
        self.workers.release_memory()


def _send(
    tensors: NamedTensors, *, workers: WeightUpdateClient, version: str, most_bytes: int, dtype: Precision
) -> int:
    """Send the tensors, in the process that has the weights. Returns the bytes sent."""
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
    """Cast tensors into `memory`, in messages like those from `buckets`. Each is sent before the next one begins."""
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
