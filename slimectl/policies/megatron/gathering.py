"""What the last pipeline stages computed, known to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from slimectl.policies.tokens import combined
from slimectl.types import Metrics


def per_row(kept: Sequence[dict[int, list[float]]], rows: int) -> list[list[float]]:
    """The values of all rows, of which this rank kept some by their position."""
    mine = {i: values for part in kept for i, values in part.items()}
    found = {i: values for part in _from_all_ranks(mine) for i, values in part.items()}
    return [found[i] for i in range(rows)]


def totals(kept: Sequence[dict[str, Tensor]]) -> Metrics:
    """Sums by name over micro-batches and ranks, in order: the same on every rank to the last digit."""
    sums = combined(kept)
    return {"loss": 0.0} | combined(_from_all_ranks({name: value.item() for name, value in sums.items()}))


def _from_all_ranks(part: dict[Any, Any]) -> list[dict[Any, Any]]:
    """The parts of one rank of each data-parallel replica: the ranks of a replica all keep the same."""
    parts: list[dict[Any, Any]] = [{} for _ in range(dist.get_world_size())]
    speaks = (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
    if len(parts) == 1:
        return [part]
    dist.all_gather_object(parts, part if speaks else {})
    return parts
