"""Operations of all transports on a stream of weights: cast it, split it into messages, read it to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from slimectl.ports import NamedTensors

Message = list[tuple[str, Tensor]]

EXACT = "e_score_correction_bias"
"""Suffix of tensors that stay in float32: a router's bias is small beside its effect, every engine keeps it exact."""


def cast(tensors: NamedTensors, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Cast floating tensors to the engine's precision (None: unchanged), where the engine would round them anyway."""
    for name, tensor in tensors:
        is_cast = tensor.is_floating_point() and tensor.element_size() > 1 and not name.endswith(EXACT)
        yield name, tensor.detach().to(dtype) if dtype is not None and is_cast else tensor.detach()


def messages(tensors: NamedTensors, most_bytes: int) -> Iterator[tuple[Message, bool]]:
    """Group consecutive tensors into messages of at most `most_bytes`; yields each and whether it is the last.

    A larger tensor is a message by itself.
    """
    message: Message = []
    size = 0
    for name, tensor in tensors:
        if message and size + tensor.nbytes > most_bytes:
            yield message, False
            message, size = [], 0
        message.append((name, tensor))
        size += tensor.nbytes
    if message:
        yield message, True


@contextmanager
def to_the_end(tensors: NamedTensors) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Exhaust the stream on exit, even after an error: other ranks take part in each tensor and would wait for ever."""
    stream = iter(tensors)
    try:
        yield stream
    finally:
        for _ in stream:
            pass


def named(version: str, *, last: bool) -> str:
    """Return the version to load a message under: engines of an interrupted push must not pass for complete."""
    return version if last else f"{version}-incomplete"
