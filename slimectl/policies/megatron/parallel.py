"""Process groups of a parallel layout: checks against the model, start and stop."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from slimectl.architectures.config import Architecture
from slimectl.architectures.parallel import ParallelLayout, problems
from slimectl.errors import BackendError, CheckpointError, SettingsError
from slimectl.policies.megatron import cpu_patches

_active_layout: ParallelLayout | None = None
_created_world = False


def check(layout: ParallelLayout, architecture: Architecture, world: int) -> None:
    """Check that the model supports the layout.

    Raises SettingsError, in one line with the setting to change, if it does not, and CheckpointError if the model
    cannot be trained at all.
    """
    for problem in problems(layout, architecture.transformer, world):
        raise SettingsError(problem)
    if architecture.layer == "sparse_latent":
        raise CheckpointError(
            "config.json: attention to the tokens that an indexer picks (glm_moe_dsa) is converted but not trained;"
            " give a model with another attention"
        )


def start(layout: ParallelLayout, seed: int) -> None:
    """Create the groups of `layout` from the ranks of torch.distributed, or from this process alone if there are none.

    Several models of one layout share the groups: starting it again does nothing. Raises BackendError if another
    layout is running.
    """
    global _active_layout, _created_world
    if _active_layout == layout and parallel_state.is_initialized():
        return
    if _active_layout is not None:
        raise BackendError(f"this process already runs {_active_layout}; all models of a process share one layout")
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        _created_world = True
    with cpu_patches.shared_groups() if cpu_patches.needed() else nullcontext():
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
    """Destroy the groups, and the world group if `start` created it; models of this layout become unusable."""
    global _active_layout, _created_world
    # mcore (0.16.1) drops most groups without destroying them: each keeps threads that poll.
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
