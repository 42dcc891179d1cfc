"""The process groups of a layout: checked against the model, started and stopped."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from slimectl.errors import BackendError, CheckpointError, SettingsError
from slimectl.layouts import ParallelLayout, problems
from slimectl.weights.architecture import Architecture

_started: ParallelLayout | None = None
_own_world = False


def check(layout: ParallelLayout, architecture: Architecture, world: int) -> None:
    """Raises SettingsError, in one line with the setting to change, if the model cannot be laid out so, and
    CheckpointError if it cannot be trained at all."""
    for problem in problems(layout, architecture.transformer, world):
        raise SettingsError(problem)
    if architecture.layer == "sparse_latent":
        raise CheckpointError(
            "config.json: attention to the tokens that an indexer picks (glm_moe_dsa) is converted but not trained;"
            " give a model with another attention"
        )


def start(layout: ParallelLayout, seed: int) -> None:
    """Make the groups of `layout` from the ranks of torch.distributed, or from this process alone if there are none.

    Several models of one layout share the groups: starting it again does nothing. Raises BackendError if another
    layout is running.
    """
    global _started, _own_world
    if _started == layout and parallel_state.is_initialized():
        return
    if _started is not None:
        raise BackendError(f"this process already runs {_started}; all models of a process share one layout")
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        _own_world = True
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    _started = layout


def stop() -> None:
    """Forget the groups, and leave the world if `start` made it; models of this layout cannot be used any more."""
    global _started, _own_world
    # mcore (0.16.1) forgets most groups without ending them: each keeps threads that poll.
    made = [group for group in parallel_state._global_process_group_list or [] if isinstance(group, dist.ProcessGroup)]
    parallel_state.destroy_model_parallel()
    for group in made:
        if group in dist.distributed_c10d._world.pg_map:  # some it does end
            dist.destroy_process_group(group)
    if _own_world and dist.is_initialized():
        dist.destroy_process_group()
    _started, _own_world = None, False
