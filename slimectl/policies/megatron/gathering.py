"""Gathers outputs of the last pipeline stages to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from slimectl.policies.tokens import combined
from slimectl.types import Metrics


def per_row(outputs: Sequence[dict[int, list[float]]], rows: int) -> list[list[float]]:
    """Gather the values of all rows from `outputs`, this rank's values by index of the row."""
    local_values = {i: values for part in outputs for i, values in part.items()}
    values_by_row = {i: values for part in _gather_replicas(local_values) for i, values in part.items()}
    return [values_by_row[i] for i in range(rows)]


def totals(outputs: Sequence[dict[str, Tensor]]) -> Metrics:
    """Sum metrics by name over micro-batches and ranks, in order: bitwise equal on every rank."""
    sums = combined(outputs)
    return {"loss": 0.0} | combined(_gather_replicas({name: value.item() for name, value in sums.items()}))


def _gather_replicas(part: dict[Any, Any]) -> list[dict[Any, Any]]:
    """Gather the parts of one rank of each data-parallel replica: the ranks of a replica hold the same values."""
    parts: list[dict[Any, Any]] = [{} for _ in range(dist.get_world_size())]
    contributes = (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
    if len(parts) == 1:
        return [part]
    dist.all_gather_object(parts, part if contributes else {})
    return parts
