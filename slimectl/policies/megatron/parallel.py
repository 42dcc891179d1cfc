"""Ranks of a parallel layout: process groups, the pipeline's schedule, and outputs of the last stages on every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from slimectl.architectures.config import Architecture
from slimectl.architectures.parallel import SETTINGS, ParallelLayout, problems
from slimectl.errors import BackendError, SettingsError
from slimectl.policies.megatron.batch import MicroBatch
from slimectl.policies.metrics import merge_metrics, read_metrics
from slimectl.system.liveness import note_progress
from slimectl.types import Metrics

_active_layout: ParallelLayout | None = None
_created_world = False


def check(layout: ParallelLayout, architecture: Architecture, world: int) -> None:
    """Check that the model supports the layout.

    Raises SettingsError, in one line with the setting to change, if it does not.
    """
    for problem in problems(layout, architecture.transformer, world):
        raise SettingsError(problem)
    stages = layout.pipeline * (layout.virtual_pipeline or 1)
    starts = range(0, architecture.layers, architecture.layers // stages) if architecture.indexers else ()
    if shared := [start for start in starts if not architecture.indexers[start]]:
        raise SettingsError(
            f"{SETTINGS['pipeline']}: {layout.pipeline} makes layer {shared[0]} the first of a stage, but it attends to"
            " the tokens that the indexer of an earlier layer picks. Choose a size whose stages begin with an indexer"
            " (indexer_types in config.json)."
        )


def start(layout: ParallelLayout, seed: int) -> None:
    """Create the groups of `layout` from the ranks of torch.distributed, or from only this process if there are none.

    Several models of one layout share the groups, so starting it again does nothing. Raises BackendError if another
    layout is running.
    """
    global _active_layout, _created_world
    if _active_layout == layout and parallel_state.is_initialized():
        return
    if _active_layout is not None:
        raise BackendError(f"this process already runs {_active_layout}. All models of a process share one layout.")
    if not torch.cuda.is_available() and "megatron_on_cpu" not in sys.modules:
        raise BackendError(
            'train.backend = "megatron": there is no GPU. To try Megatron-core on a CPU, run in a clone of slimectl:'
            " pip install ./tests/support/cpu"
        )
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        _created_world = True
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    _active_layout = layout


def stop() -> None:
    """Destroy the groups, and the world group if `start` created it. Models of this layout become unusable."""
    global _active_layout, _created_world
    # mcore (0.16.1) drops most groups without destroying them, and each keeps threads that poll.
    groups = [
        group for group in parallel_state._global_process_group_list or [] if isinstance(group, dist.ProcessGroup)
    ]
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:  # mcore destroys some
            dist.destroy_process_group(group)
    # Threads end with the last reference to a group, and mcore's globals keep some.
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    parallel_state._global_process_group_list = None
    if _created_world and dist.is_initialized():
        dist.destroy_process_group()
    _active_layout, _created_world = None, False


def per_row(outputs: Sequence[dict[int, list[Any]]], rows: int) -> list[list[Any]]:
    """Gather the values of all rows from `outputs`, which has this rank's values by row index."""
    local_values = {i: values for part in outputs for i, values in part.items()}
    values_by_row = {i: values for part in _gather_replicas(local_values) for i, values in part.items()}
    return [values_by_row[i] for i in range(rows)]


def totals(outputs: Sequence[dict[str, Tensor]]) -> Metrics:
    """Sum metrics by name over micro-batches and ranks, in order. The result is bitwise equal on every rank."""
    return {"loss": 0.0} | merge_metrics(_gather_replicas(read_metrics(merge_metrics(outputs))))


def _gather_replicas(part: dict[Any, Any]) -> list[dict[Any, Any]]:
    """Gather the parts of one rank per data-parallel replica, because the ranks of a replica hold the same values."""
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


Finish = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]
"""(batch, hidden states) on the last stage: the value to differentiate, and the output to return."""

Forward = Callable[[MicroBatch, int], Tensor]
"""(batch, index of a chunk): its hidden states."""


def run(
    chunks: Sequence[nn.Module],
    batches: Sequence[MicroBatch],
    finish: Finish,
    *,
    forward: Forward,
    forward_only: bool,
) -> list[Any]:
    """Run forward and, unless `forward_only`, backward of all micro-batches.

    Returns the outputs of `finish` on the last stage. Gradients accumulate in the main gradients of this rank. Only
    optimizer.step reduces them over ranks, so that several calls make one step.
    """

    def step(batches: Iterator[MicroBatch], chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        note_progress()
        batch = next(batches)
        hidden = forward(batch, next(i for i, candidate in enumerate(chunks) if candidate is chunk))

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, output = finish(batch, hidden)
            # The number of tokens would divide the gradient, but the loss is a sum that needs no division.
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
