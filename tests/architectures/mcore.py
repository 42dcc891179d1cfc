"""A GPTModel as Megatron-core itself builds it, in this process alone: no module of ours in its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from slimectl.architectures.config import Architecture
from slimectl.policies.megatron import parallel


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A world of one rank, without a port; what a policy of this process began before is ended."""
    parallel.stop()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def bare_model(architecture: Architecture) -> GPTModel:
    """mcore's own layers with the architecture's fields."""
    kind = MLATransformerConfig if architecture.mla else TransformerConfig
    config = kind(
        **architecture.transformer,
        activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True,
        moe_token_dispatcher_type="alltoall",
    )
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False  # mcore (0.16.1) says that it has what it failed to import
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in block.layer_specs if architecture.mla else ():
        # It has no parameters, and mcore's own (0.16.1) does not take part in latent attention.
        layer.submodules.self_attention.submodules.core_attention = IdentityOp
    return GPTModel(
        config,
        block,
        vocab_size=architecture.vocab_size,
        max_sequence_length=64,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
    )


def bare_delta_net(architecture: Architecture) -> GatedDeltaNet:
    """mcore's gated delta net with linear layers of its own."""
    config = TransformerConfig(
        **architecture.transformer, activation_func=torch.nn.functional.silu, use_cpu_initialization=True
    )
    linears = GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
    config.layernorm_zero_centered_gamma = False  # which its norm without TransformerEngine cannot have
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    return GatedDeltaNet(config, linears, layer_number=1, pg_collection=groups)


def sharded(model: GPTModel, **metadata: bool) -> dict[str, list[ShardedTensor]]:
    """What a torch_dist checkpoint of the model holds: by key, the regions in it."""
    found: dict[str, list[ShardedTensor]] = {}
    for piece in pieces(model.sharded_state_dict(metadata=metadata or None)):
        found.setdefault(piece.key, []).append(piece)
    return found


def pieces(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Every tensor of a sharded state, state objects left out."""
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):
            yield from pieces(value.build())
        elif not isinstance(value, ShardedObject):
            yield value
