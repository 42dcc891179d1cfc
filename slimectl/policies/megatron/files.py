"""The files of a checkpoint, those of the FSDP policy: one rank writes, each reads as far as it needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slimectl.policies.megatron.masters import PARAM
from slimectl.policies.megatron.state import LinkedState
from slimectl.policies.state import MOMENTS, OPTIMIZER, copy_companions, read_tensors, write_float32, write_trainer
from slimectl.ports import CheckpointFormat
from slimectl.weights.links import Link


def save(
    path: Path,
    checkpoint: CheckpointFormat,
    state: LinkedState,
    *,
    names: Sequence[str],
    updated: Sequence[Link],
    companions: Path,
    facts: dict[str, Any],
) -> None:
    """Float32 weights called `names` as a Hugging Face directory, the moments of `updated`, and `facts`.

    Config and tokenizer are those of `companions`.
    """
    weights, moments = state.tensors(names, PARAM), state.each(updated, MOMENTS)
    if dist.get_rank() == 0:
        checkpoint.write(path, weights)
        write_float32(path / OPTIMIZER, _moment_shapes(updated), moments)
        copy_companions(companions, path, torch.float32)
        write_trainer(path, **facts)
    else:
        # The first rank's tensors are made of all ranks' parts.
        for _ in chain(weights, moments):
            pass
    dist.barrier()


def load_moments(path: Path, state: LinkedState, updated: Iterable[Link], *, updates: int) -> None:
    """Take back this rank's part of the moments of `updated`, after so many updates. Raises CheckpointError."""
    mine = state.mine(updated)
    stream = read_tensors(path / OPTIMIZER, _moment_shapes(mine))
    for link in mine:
        for what in MOMENTS:
            parts = {name: next(stream)[1] for name in link.hf}
            state.put(link, what, parts.__getitem__, updates=updates)


def _moment_shapes(links: Iterable[Link]) -> dict[str, torch.Size]:
    """In the order of LinkedState.each."""
    return {
        f"{what}.{name}": torch.Size(shape)
        for link in links
        for what in MOMENTS
        for name, shape in zip(link.hf, link.shapes, strict=True)
    }
