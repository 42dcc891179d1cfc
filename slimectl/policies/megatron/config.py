"""Checks megatron.args and builds mcore's TransformerConfig from an architecture and a parallel layout."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from slimectl.architectures.config import Architecture
from slimectl.architectures.parallel import SETTINGS, ParallelLayout
from slimectl.errors import SettingsError
from slimectl.policies.megatron.rotary import softmax_scale
from slimectl.policies.recompute import Recompute, check_modules

ARGUMENT_CLASSES = (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
"""Configuration classes whose fields [megatron.args] may set."""

_OPTIMIZER = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
_RECOMPUTE = ("recompute_granularity", "recompute_modules")
_SETTING_OF_ARG = {setting.removeprefix("megatron."): setting for setting in SETTINGS.values()} | {
    "sequence_parallel": SETTINGS["tensor"],
    **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype"), "train.dtype"),
    **{name: f"train.{name}" for name in _OPTIMIZER},
    **{name: f"train.{name}" for name in _RECOMPUTE},
    **{name: f"megatron.{name}" for name in ("use_distributed_optimizer", "optimizer_cpu_offload")},
}
"""Arguments that a setting controls, with the name of that setting."""


def field_names(kind: type) -> set[str]:
    """Return the fields that the installed version of a configuration class accepts."""
    return {field.name for field in dataclasses.fields(kind) if field.init}


def check_args(args: Mapping[str, Any]) -> None:
    """Check the names in [megatron.args].

    Raises SettingsError for an argument that a setting controls, or that no class of megatron-core has. The message
    then suggests the nearest name.
    """
    for name in (name for name in args if name in _SETTING_OF_ARG):
        raise SettingsError(f"megatron.args.{name}: slimectl has a setting for this. Set {_SETTING_OF_ARG[name]}")
    accepted = set().union(*(field_names(kind) for kind in ARGUMENT_CLASSES))
    for name in args:
        if name not in accepted:
            matches = difflib.get_close_matches(name, sorted(accepted), n=1)
            hint = f". Did you mean {matches[0]}?" if matches else ". See TransformerConfig of megatron-core."
            raise SettingsError(f"megatron.args.{name}: megatron-core has no such argument{hint}")


def _check_against_model(args: Mapping[str, Any], architecture: Architecture) -> None:
    """Raise SettingsError for an argument that would change the model, or that packed training depends on."""
    for name, value in args.items():
        if name in architecture.transformer and name not in _TUNABLE and value != architecture.transformer[name]:
            raise SettingsError(
                f"megatron.args.{name}: {value}, but the model's config.json sets it to"
                f" {architecture.transformer[name]}. Leave it out."
            )
        if name in _NEEDED and value != _ALWAYS[name]:
            raise SettingsError(
                f"megatron.args.{name}: {value}, but packed training needs {_ALWAYS[name]}. Leave it out."
            )


ACTING = frozenset({
    # numbers of training
    "hidden_dropout", "fp32_residual_connection", "softmax_scale", "moe_aux_loss_coeff", "moe_z_loss_coeff",
    "moe_router_load_balancing_type", "moe_router_bias_update_rate", "moe_router_dtype", "moe_input_jitter_eps",
    "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy",
    "moe_router_force_load_balancing", "moe_shared_expert_overlap", "apply_wd_to_qk_layernorm",
    # gradients and the optimizer's memory
    "bucket_size", "pad_buckets_for_high_nccl_busbw", "num_distributed_optimizer_instances", "nccl_ub",
    "disable_symmetric_registration", "grad_reduce_in_fp32", "reduce_scatter_with_fp32_accumulation",
    "check_for_nan_in_grad", "check_for_large_grads", "optimizer_offload_fraction",
    "use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params",
    "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    # activations, kernels, logs
    "recompute_method", "recompute_num_layers", "distribute_saved_activations", "deterministic_mode",
    "bias_activation_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion", "moe_permute_fusion",
    "moe_router_fusion", "config_logger_dir",
    # pipelines
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "deallocate_pipeline_outputs",
    "pipeline_model_parallel_comm_backend", "batch_p2p_sync", "overlap_p2p_comm", "batch_p2p_comm",
    "microbatch_group_size_per_vp_stage", "defer_embedding_wgrad_compute", "wgrad_deferral_limit",
})  # fmt: skip
"""Arguments that this trainer acts on and that no setting, model or requirement of packed training determines."""

ENGINE = "transformer_engine"
"""Value of transformer_impl for which attention and MLP use TransformerEngine's matrix products."""

FP8_ARGUMENTS = frozenset({
    "fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad",
    "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
})  # fmt: skip
"""Arguments that have an effect only with TransformerEngine."""

FP8_TOKENS = 32
"""With fp8, the tokens of a rank are a multiple of this. Products in blocks of MXFP8 need 32, others 16 or 8."""

_REASONS = {
    "fp8": 'low precision needs TransformerEngine: transformer_impl = "transformer_engine"',
    "fp4": "4-bit products are not supported",
    "first_last_layers_bf16": "it belongs to fp8, which needs TransformerEngine",
    "tp_comm": "it needs buffers of TransformerEngine that slimectl does not create",
    "overlap_moe": "its schedule divides megatron-core's own model, but slimectl applies the head separately",
    "ep_overlap": "it belongs to overlap_moe_expert_parallel_comm",
    "delay_wgrad": "it needs TransformerEngine's linear layers",
    "cuda_graph": "packs differ in shape",
    "cpu_offloading": "it needs TransformerEngine. Set megatron.recompute_granularity instead",
    "mtp": "layers for multi-token prediction are not trained",
    "attention": "attention is slimectl's own, without dropout",
    "window": "every token attends to its whole sequence",
    "softmax_type": "attention is slimectl's own, with the plain softmax",
    "decoupled": "all weights have train.lr",
    "loss_scale": "train.dtype is never float16",
    "sgd": "the optimizer is AdamW",
    "muon": "the optimizer is AdamW",
}
"""Reasons why arguments have no effect, by the beginning of their names."""


def uses_engine(args: Mapping[str, Any]) -> bool:
    return args.get("transformer_impl") == ENGINE


def _check_engine(args: Mapping[str, Any], architecture: Architecture, dtype: torch.dtype) -> None:
    """Raise SettingsError if TransformerEngine is requested but not installed, or has no such layers here."""
    if not uses_engine(args):
        return
    transformer = architecture.transformer
    kinds = {
        "latent attention": architecture.mla,
        "experts": transformer.get("num_moe_experts"),
        "linear attention": transformer.get("linear_attention_freq"),
    }
    name = f"megatron.args.transformer_impl: {ENGINE}"
    for kind in (kind for kind, present in kinds.items() if present):
        raise SettingsError(f"{name}, but layers with {kind} are megatron-core's local ones here. Drop it.")
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise SettingsError(
            f"{name} is not installed for {sys.executable}. With a GPU run: {sys.executable} -m pip install "
            f"--no-build-isolation 'transformer-engine[pytorch]', or drop it"
        )
    if args.get("fp8") and dtype != torch.bfloat16:
        raise SettingsError('megatron.args.fp8: fp8 products need bfloat16. Set train.dtype = "bfloat16".')


def _check_messages(args: Mapping[str, Any], layout: ParallelLayout) -> None:
    """Raise SettingsError for an argument that would make pipeline stages wait for each other without end.

    Two ranks over gloo did so (megatron-core 0.16.1). Packs differ in length, so stages exchange shapes before tensors,
    and interleaved stages exchange both ways with the same peer.
    """
    interleaved = layout.virtual_pipeline is not None
    reasons = {
        "overlap_p2p_comm_warmup_flush": "stages exchange the shapes of packs first, and would wait for each other",
        "use_ring_exchange_p2p": "torch has no ring exchange",
    }
    if interleaved:
        reasons["batch_p2p_comm"] = "one batch would mix up the messages that interleaved stages send both ways"
    else:
        reasons["overlap_p2p_comm"] = "only interleaved stages overlap their messages (virtual pipeline)"
    for name in (name for name in reasons if args.get(name)):
        raise SettingsError(f"megatron.args.{name}: is not possible ({reasons[name]}). Drop it.")
    if interleaved and args.get("overlap_p2p_comm") is False:
        raise SettingsError("megatron.args.overlap_p2p_comm: False, but interleaved stages overlap. Drop it.")


def refuse_idle(args: Mapping[str, Any], config: Any, *, acting: Iterable[str] = ()) -> None:
    """Raise SettingsError for an argument that has no effect, unless `config` has its value anyway."""
    for name, value in args.items():
        if name in ACTING or name in _NEEDED or name in acting or not hasattr(config, name):
            continue
        if value != getattr(config, name):
            reason = next((why for start, why in _REASONS.items() if name.startswith(start)), "nothing here reads it")
            raise SettingsError(f"megatron.args.{name}: {value} has no effect ({reason}). Drop it.")


def _refuse_other_families(args: Mapping[str, Any], kind: type) -> None:
    """Raise SettingsError for an argument that only models with latent attention have."""
    for name in args:
        if not any(
            name in field_names(config_class) for config_class in (kind, OptimizerConfig, DistributedDataParallelConfig)
        ):
            raise SettingsError(f"megatron.args.{name}: has no effect (the model has no latent attention). Drop it.")


def args_of(args: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Select the arguments that class `kind` accepts."""
    return {name: value for name, value in args.items() if name in field_names(kind)}


def transformer_config(
    architecture: Architecture,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    args: Mapping[str, Any] | None = None,
    recompute: Recompute | None = None,
    **fields: Any,
) -> TransformerConfig:
    """Build the configuration of a model. `fields` override it, and the user's `args` override both.

    Raises SettingsError for an unknown argument, and for values that megatron-core rejects.
    """
    check_args(args or {})
    _check_against_model(args or {}, architecture)
    experts, layers = (architecture.transformer.get(name) for name in ("num_moe_experts", "moe_layer_freq"))
    dense = not experts or (0 in layers if isinstance(layers, list) else (layers or 1) > 1)
    check_modules(recompute or Recompute(), mlp=dense, moe=bool(experts))
    kind = MLATransformerConfig if architecture.mla else TransformerConfig
    values = {
        **_ALWAYS,
        "activation_func": _ACTIVATIONS[architecture.activation],
        **architecture.transformer,
        **_parallel_fields(layout),
        **_recompute_fields(recompute or Recompute()),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "transformer_impl": "local",
        **fields,
    }
    if architecture.layer == "wide_qk_norm":
        # mcore sums gradients of query and key norms over tensor-parallel ranks. These are sharded, not replicated.
        values["qk_layernorm"] = False
    if architecture.mla:
        width = values["qk_head_dim"] + values["qk_pos_emb_head_dim"]
        values.setdefault("softmax_scale", softmax_scale(architecture.rope, width, architecture.max_positions))
    _check_messages(args or {}, layout)
    _check_engine(args or {}, architecture, dtype)
    _refuse_other_families(args or {}, kind)
    acting = {"transformer_impl", *FP8_ARGUMENTS} if uses_engine(args or {}) else ()
    refuse_idle(args_of(args or {}, kind), SimpleNamespace(**_defaults(kind) | values), acting=acting)
    if values.get("linear_attention_freq"):
        # megatron-core (0.16.1) rejects context parallelism with its own gated delta net. PackedDeltaNet divides heads
        # over the ranks. Delete when it is accepted.
        values["context_parallel_size"] = 1
    try:
        # This module sets some fields that older versions lack. The user's arguments are checked above.
        config = kind(**args_of(values | args_of(args or {}, kind), kind))
        config.context_parallel_size = layout.context
        return config
    except (AssertionError, TypeError, ValueError) as error:
        raise SettingsError(f"megatron-core rejects the configuration: {' '.join(str(error).split())}") from error


_TUNABLE = {"hidden_dropout", "attention_dropout", "moe_aux_loss_coeff", "moe_router_bias_update_rate"}
"""Fields with a default from the architecture that training may override."""
_NEEDED = {"variable_seq_lengths", "calculate_per_token_loss", "moe_token_dispatcher_type"}
"""Fields that the attention, batches and losses of this package depend on."""


def _defaults(kind: type) -> dict[str, Any]:
    """Return the plain defaults of a configuration class."""
    return {field.name: field.default for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}


def _skip_initialization(weight: Tensor) -> Tensor:
    """Skip initialization, because weights are loaded afterwards.

    With `perform_initialization=False`, mcore (0.16.1) also omits the attributes that gradient norms need to recognize
    a sharded parameter.
    """
    return weight


_ACTIVATIONS = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda states: states * torch.sigmoid(1.702 * states),
}

_ALWAYS: dict[str, Any] = {
    "init_method": _skip_initialization,
    "output_layer_init_method": _skip_initialization,
    "embedding_init_method": _skip_initialization,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # Fusions need TransformerEngine or apex, or change gradients.
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "cross_entropy_loss_fusion": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_grouped_gemm": False,
    # Packed rows differ in length from one micro-batch to the next. The allgather dispatcher does not support that.
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "calculate_per_token_loss": True,
    # The default is a deprecated value that causes a warning.
    "cuda_graph_scope": [],
}


def _parallel_fields(layout: ParallelLayout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.tensor > 1,
        # Interleaved stages on two ranks exchange both ways with the same peer, and one batch of messages mixes them
        # up.
        "overlap_p2p_comm": layout.virtual_pipeline is not None,
        "batch_p2p_comm": layout.virtual_pipeline is None,
    }


def _recompute_fields(recompute: Recompute) -> dict[str, Any]:
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
