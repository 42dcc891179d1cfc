"""Gathers outputs of the last pipeline stages to every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from slimectl.policies.megatron.batch import Batch
from slimectl.policies.token_batch import merge_metrics, read_metrics
from slimectl.types import Metrics


def per_row(outputs: Sequence[dict[int, list[float]]], rows: int) -> list[list[float]]:
    """Gather the values of all rows from `outputs`, this rank's values by index of the row."""
    local_values = {i: values for part in outputs for i, values in part.items()}
    values_by_row = {i: values for part in _gather_replicas(local_values) for i, values in part.items()}
    return [values_by_row[i] for i in range(rows)]


def totals(outputs: Sequence[dict[str, Tensor]]) -> Metrics:
    """Sum metrics by name over micro-batches and ranks, in order: bitwise equal on every rank."""
    return {"loss": 0.0} | merge_metrics(_gather_replicas(read_metrics(merge_metrics(outputs))))


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


Finish = Callable[[Batch, Tensor], tuple[Tensor, Any]]
"""(batch, hidden states) on the last stage: the value to differentiate, and the output to return."""

Forward = Callable[[Batch, int], Tensor]
"""(batch, index of a chunk): its hidden states."""


def run(
    chunks: Sequence[nn.Module],
    batches: Sequence[Batch],
    finish: Finish,
    *,
    forward: Forward,
    forward_only: bool,
) -> list[Any]:
    """Run forward and, unless `forward_only`, backward of all micro-batches.

    Returns the outputs of `finish` on the last stage. Gradients accumulate in the main gradients of this rank; only
    optimizer.step reduces them over ranks, so that several calls make one step.
    """

    def step(batches: Iterator[Batch], chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(batches)
        hidden = forward(batch, next(i for i, candidate in enumerate(chunks) if candidate is chunk))

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, output = finish(batch, hidden)
            # The number of tokens would divide the gradient; the loss is a sum that needs no division.
            return value, torch.zeros((), dtype=torch.int, device=value.device), output

        return hidden, loss

    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(batches),
            seq_length=1,  # variable_seq_lengths: the stages exchange the shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )
