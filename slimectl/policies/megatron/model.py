"""Builds models from an architecture: layer specifications, layers that mcore lacks, and the chunks of a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
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
from torch import Tensor, nn

from slimectl.architectures.config import Architecture
from slimectl.policies.causal_attention import Scoring
from slimectl.policies.megatron.attention import PackedCoreAttention, PackedSelfAttention
from slimectl.policies.megatron.batch import PackedSequences
from slimectl.policies.megatron.config import ENGINE, transformer_config
from slimectl.policies.megatron.delta_net import PackedDeltaNet, PlainRMSNorm
from slimectl.policies.megatron.mla import LatentAttention
from slimectl.policies.megatron.moe import Experts, Router
from slimectl.policies.megatron.norms import RMSNorm, WideKeyNorm, WideQueryNorm
from slimectl.policies.megatron.rotary import Rotary
from slimectl.policies.options import MegatronOptions, TrainerOptions

AddResidual = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class SandwichLayer(TransformerLayer):
    """A layer with further norms on the outputs of attention and MLP, before the residual addition (GLM-4)."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.self_attn_bda: Any = _add_normalized(self.self_attn_bda, self.post_self_attn_layernorm)
        self.mlp_bda: Any = _add_normalized(self.mlp_bda, self.post_mlp_layernorm)


def _add_normalized(add: Callable[[bool, bool], AddResidual], norm: RMSNorm) -> Callable[[bool, bool], AddResidual]:
    """Wrap mcore's bias-dropout-add so that the output is normalized first."""

    def build(training: bool, fused: bool) -> AddResidual:
        def normed(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            biased = output if bias is None else output + bias
            return add(training, fused)((norm(biased), None), residual, dropout)

        return normed

    return build


def block_spec(architecture: Architecture, config: Any, *, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers that this pipeline rank builds for `virtual_stage`, and the last norm."""
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
            self_attention=_attention_of(architecture, config, index),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_experts() if experts else ModuleSpec(module=MLP, submodules=_linears(*_products(config))),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={}
            if architecture.mla
            else _stored_names("in_proj" if linear else "linear_qkv"),
        ),
    )


def _stored_names(projection: str) -> dict[str, str]:
    """Return checkpoint names as in mcore's local layers (architectures/torch_dist_keys.py has the others)."""
    return {
        "input_layernorm.": f"self_attention.{projection}.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }


def _has_experts(config: Any, index: int) -> bool:
    if not config.num_moe_experts:
        return False
    pattern = config.moe_layer_freq
    return bool(pattern[index]) if isinstance(pattern, list) else index % pattern == 0


def _attention_of(architecture: Architecture, config: Any, index: int) -> ModuleSpec:
    if architecture.linear_attention(index):
        return ModuleSpec(
            module=PackedDeltaNet,
            submodules=GatedDeltaNetSubmodules(
                in_proj=ColumnParallelLinear, out_norm=PlainRMSNorm, out_proj=RowParallelLinear
            ),
        )
    if architecture.mla:
        epsilon = architecture.extra.get("latent_norm_epsilon")
        return ModuleSpec(
            module=LatentAttention,
            params={"norm_epsilon": epsilon, "selecting_layer": architecture.selecting_layer(index)},
        )
    return _grouped_query_attention(architecture, config, architecture.window(index))


def _grouped_query_attention(architecture: Architecture, config: Any, window: int | None) -> ModuleSpec:
    query_norm, key_norm = (RMSNorm, RMSNorm) if config.qk_layernorm else (IdentityOp, IdentityOp)
    wide_norms = (WideQueryNorm, WideKeyNorm) if architecture.layer == "wide_qk_norm" else None
    column, row = _products(config)
    return ModuleSpec(
        module=PackedSelfAttention,
        params={"local_rope": window is not None and architecture.local_rope is not None, "norms": wide_norms},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=ModuleSpec(
                module=PackedCoreAttention, params={"scoring": Scoring(window), "sinks": architecture.sinks}
            ),
            linear_proj=row,
            q_layernorm=query_norm,
            k_layernorm=key_norm,
        ),
    )


def _products(config: Any) -> tuple[type, type]:
    """Return the column- and row-parallel products of attention and MLP. Their parameters have the same names."""
    if config.transformer_impl != ENGINE:
        return ColumnParallelLinear, RowParallelLinear
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    return TEColumnParallelLinear, TERowParallelLinear


def _linears(column: type = ColumnParallelLinear, row: type = RowParallelLinear) -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=column, linear_fc2=row)


def _experts() -> ModuleSpec:
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=Experts, submodules=_linears()),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=_linears()),
            router=Router,
        ),
    )


class HiddenStateGPT(GPTModel):
    """GPTModel that returns hidden states. The caller applies the head, to only a few of the tokens.

    It has the same parameters as GPTModel, and so the same checkpoints.
    """

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    @property
    def output_weight(self) -> nn.Parameter:
        """Return the head's rows on this tensor-parallel rank, [V / tensor, H], or the embedding if they are tied.

        On the last stage only. In a pipeline of several stages a tied head is the last stage's copy of the embedding
        (`output_layer.weight`), whose gradient mcore adds to the first stage's.
        """
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class PackedGPT(HiddenStateGPT):
    """The model of an architecture, with slimectl's layers for packed sequences."""

    def __init__(self, architecture: Architecture, config: Any, *, vocab_size: int, virtual_stage: int | None) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(architecture, config, virtual_stage=virtual_stage),
            vocab_size=vocab_size,
            max_sequence_length=architecture.max_positions,
            pre_process=_is_first(virtual_stage),
            post_process=_is_last(virtual_stage),
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="none",
            vp_stage=virtual_stage,
        )
        head_dim = config.qk_pos_emb_head_dim if architecture.mla else config.kv_channels
        sizes = {"head_dim": head_dim, "max_positions": architecture.max_positions}
        self.rotary = Rotary(architecture.rope, **sizes, device=device())
        local = architecture.local_rope
        self.local_rotary = None if local is None else Rotary(local, **sizes, device=device())
        if self.pre_process and architecture.embedding_scale != 1.0:
            scale = torch.tensor(architecture.embedding_scale).to(config.params_dtype).item()
            self.embedding.register_forward_hook(lambda _module, _inputs, embedded: embedded * scale)

    def forward(self, tokens_T: Tensor | None, packed: PackedSequences) -> Tensor:
        """Return the hidden states of the rank's tokens, [T, 1, H].

        `tokens_T` are the tokens at `packed.index_T`, None except on the first stage. On the last stage the final norm
        is applied. Under tensor parallelism each rank returns its part of the tokens (T / tensor rows).
        """
        packed.angles = self.rotary(packed.positions_T)
        packed.local_angles = None if self.local_rotary is None else self.local_rotary(packed.positions_T)
        return super().forward(
            input_ids=None if tokens_T is None else tokens_T[None],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=packed,
            padding_mask=self._padding(packed) if self.config.num_moe_experts else None,
        )

    def _padding(self, packed: PackedSequences) -> Tensor:
        """Return the padding mask for the routers' token counts, [1, T].

        mcore (0.16.1) splits it for sequence parallelism on the first pipeline stage only.
        """
        padding_1T = packed.padding_T[None]
        if self.pre_process or not self.config.sequence_parallel:
            return padding_1T
        group = self.pg_collection.tp
        return padding_1T.chunk(group.size(), dim=1)[group.rank()]


def device() -> torch.device:
    """Return the device of the models: the current GPU, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


Provide = Callable[..., PackedGPT]
"""(build, layout, config, vocab_size, pre_process, post_process, vp_stage) -> a chunk of the model.

`build()` returns the default one.
"""


def build(
    architecture: Architecture, options: TrainerOptions, megatron: MegatronOptions, provide: Provide | None = None
) -> list[PackedGPT]:
    """Build this rank's chunks of the model, one per virtual pipeline stage. Matrices are uninitialized.

    Call `parallel.start(layout, …)` first. `provide` replaces the construction of a chunk. Raises SettingsError for a
    configuration that megatron-core rejects.
    """
    layout = megatron.layout
    config = transformer_config(
        architecture, layout, dtype=options.compute_dtype, args=megatron.args, recompute=options.recompute
    )
    vocab_size = -(-architecture.vocab_size // layout.tensor) * layout.tensor
    stages: list[int | None] = list(range(layout.virtual_pipeline)) if layout.virtual_pipeline else [None]
    chunks = []
    for stage in stages:
        make = partial(PackedGPT, architecture, config, vocab_size=vocab_size, virtual_stage=stage)
        own = {"pre_process": _is_first(stage), "post_process": _is_last(stage), "vp_stage": stage}
        own |= {"config": config, "vocab_size": vocab_size}
        chunks.append(provide(make, layout, **own) if provide else make())
    # The whole chunk is moved, because mcore builds routers on the CPU and moves them when they first run.
    return [chunk.to(device()) for chunk in chunks]


def _is_first(virtual_stage: int | None) -> bool:
    return parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage)


def _is_last(virtual_stage: int | None) -> bool:
    return parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage)
