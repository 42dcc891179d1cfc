"""Layer specs of a decoder: mcore's layers with the attention, norms and experts of this package."""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from slimectl.policies.megatron.attention import PackedCoreAttention, PackedSelfAttention
from slimectl.policies.megatron.delta_net import PackedDeltaNet, PlainRMSNorm
from slimectl.policies.megatron.layers import SandwichLayer
from slimectl.policies.megatron.mla import LatentAttention
from slimectl.policies.megatron.moe import Experts, Router
from slimectl.policies.megatron.norms import RMSNorm, WideKeyNorm, WideQueryNorm
from slimectl.weights.architecture import Architecture


def block_spec(architecture: Architecture, config: Any, *, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """The layers that this pipeline rank builds for `virtual_stage`, and the last norm."""
    offset = get_transformer_layer_offset(config, vp_stage=virtual_stage)
    count = get_num_layers_to_build(config, vp_stage=virtual_stage)
    layers = [_layer(architecture, config, i) for i in range(offset, offset + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer(architecture: Architecture, config: Any, index: int) -> ModuleSpec:
    experts = _has_experts(config, index)
    linear = architecture.linear_attention(index)
    return ModuleSpec(
        module=SandwichLayer if architecture.layer == "sandwich" else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention_of(architecture, config, linear=linear),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_experts() if experts else ModuleSpec(module=MLP, submodules=_linears()),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={}
            if architecture.mla
            else _stored_names("in_proj" if linear else "linear_qkv"),
        ),
    )


def _stored_names(projection: str) -> dict[str, str]:
    """Names in a checkpoint, those of mcore's local layers (weights/stored.py has the others)."""
    return {
        "input_layernorm.": f"self_attention.{projection}.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }


def _has_experts(config: Any, index: int) -> bool:
    if not config.num_moe_experts:
        return False
    pattern = config.moe_layer_freq
    return bool(pattern[index]) if isinstance(pattern, list) else index % pattern == 0


def _attention_of(architecture: Architecture, config: Any, *, linear: bool) -> ModuleSpec:
    if linear:
        return ModuleSpec(
            module=PackedDeltaNet,
            submodules=GatedDeltaNetSubmodules(
                in_proj=ColumnParallelLinear, out_norm=PlainRMSNorm, out_proj=RowParallelLinear
            ),
        )
    if architecture.mla:
        epsilon = architecture.extra.get("latent_norm_epsilon")
        return ModuleSpec(module=LatentAttention, params={"norm_epsilon": epsilon})
    return _grouped_query_attention(architecture, config)


def _grouped_query_attention(architecture: Architecture, config: Any) -> ModuleSpec:
    query_norm, key_norm = (RMSNorm, RMSNorm) if config.qk_layernorm else (IdentityOp, IdentityOp)
    if architecture.layer == "wide_qk_norm":
        query_norm, key_norm = WideQueryNorm, WideKeyNorm
    return ModuleSpec(
        module=PackedSelfAttention,
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=query_norm,
            k_layernorm=key_norm,
        ),
    )


def _linears() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def _experts() -> ModuleSpec:
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=Experts, submodules=_linears()),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=_linears()),
            router=Router,
        ),
    )
