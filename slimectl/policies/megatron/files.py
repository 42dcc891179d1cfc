"""Checkpoint files in the format of the FSDP policy: rank 0 writes, every rank reads its own part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimectl.policies.lora import FOLDER, LoraOptions, read_adapter, write_adapter
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
    weights: Iterator[tuple[str, Tensor]],
    updated: Sequence[Link],
    companions: Path,
    trainer_state: dict[str, Any],
    adapter: tuple[LoraOptions, Path] | None = None,
) -> None:
    """Write float32 `weights` as a Hugging Face directory, the moments of `updated`, and `trainer_state`.

    Config and tokenizer are copied from `companions`. With `adapter` (its options and its base model), the trained
    parameters are written in peft's format too.
    """
    moments, learned = state.each(updated, MOMENTS), state.tensors(shapes_of(updated) if adapter else (), PARAM)
    if dist.get_rank() == 0:
        checkpoint.write(path, weights)
        write_float32(path / OPTIMIZER, _moment_shapes(updated), moments)
        if adapter is not None:
            write_adapter(path / FOLDER, *adapter, shapes_of(updated), learned)
        copy_companions(companions, path, torch.float32)
        write_trainer(path, **trainer_state)
    else:
        # Collective: rank 0 gathers its tensors from the parts of all ranks.
        for _ in chain(weights, moments, learned):
            pass
    dist.barrier()


def load_adapter(path: Path, state: LinkedState, links: Iterable[Link]) -> None:
    """Load this rank's part of the tensors of `links` from a folder in peft's format. Raises CheckpointError."""
    local_links = state.mine(links)
    stream = read_adapter(path, shapes_of(local_links))
    for link in local_links:
        parts = dict(next(stream) for _ in link.hf)
        state.put(link, PARAM, parts.__getitem__)


def load_moments(path: Path, state: LinkedState, updated: Iterable[Link], *, updates: int) -> None:
    """Load this rank's part of the moments of `updated`; `updates` is the step count. Raises CheckpointError."""
    local_links = state.mine(updated)
    stream = read_tensors(path / OPTIMIZER, _moment_shapes(local_links))
    for link in local_links:
        for moment in MOMENTS:
            parts = {name: next(stream)[1] for name in link.hf}
            state.put(link, moment, parts.__getitem__, updates=updates)


def shapes_of(links: Iterable[Link]) -> dict[str, torch.Size]:
    """Shapes of the Hugging Face tensors of the links, in order."""
    return {name: torch.Size(shape) for link in links for name, shape in zip(link.hf, link.shapes, strict=True)}


def _moment_shapes(links: Iterable[Link]) -> dict[str, torch.Size]:
    """Shapes of the moments, in the order of LinkedState.each."""
    return {
        f"{moment}.{name}": torch.Size(shape)
        for link in links
        for moment in MOMENTS
        for name, shape in zip(link.hf, link.shapes, strict=True)
    }
