"""What all transports do with a stream of weights: cast it, cut it into messages, read it to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from slimectl.ports import NamedTensors

Message = list[tuple[str, Tensor]]

EXACT = "e_score_correction_bias"
"""A router's bias is small beside what it decides; every engine keeps it in float32."""


def cast(tensors: NamedTensors, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Floating tensors in the engine's precision (None: as they come), where the engine would round them anyway."""
    for name, tensor in tensors:
        wide = tensor.is_floating_point() and tensor.element_size() > 1 and not name.endswith(EXACT)
        yield name, tensor.detach().to(dtype) if dtype is not None and wide else tensor.detach()


def messages(tensors: NamedTensors, most_bytes: int) -> Iterator[tuple[Message, bool]]:
    """Consecutive tensors of at most `most_bytes` together (a larger one goes alone), and whether they are the last."""
    held: Message = []
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > most_bytes:
            yield held, False
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield held, True


@contextmanager
def to_the_end(tensors: NamedTensors) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """The stream, exhausted whatever happens: other ranks take part in each tensor and would wait for ever."""
    stream = iter(tensors)
    try:
        yield stream
    finally:
        for _ in stream:
            pass


def named(version: str, *, last: bool) -> str:
    """The version while the message is loaded: engines that were left in between must not pass for complete."""
    return version if last else f"{version}-incomplete"
