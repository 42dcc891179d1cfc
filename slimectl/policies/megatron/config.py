"""Builds mcore's TransformerConfig from an architecture and a parallel layout."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
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

ARGUMENT_CLASSES = (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
"""Configuration classes whose fields [megatron.args] may set."""

_OPTIMIZER = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
_RECOMPUTE = ("recompute_granularity", "recompute_modules")
_SETTING_OF_ARG = {setting.removeprefix("megatron."): setting for setting in SETTINGS.values()} | {
    "sequence_parallel": SETTINGS["tensor"],
    **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype"), "train.dtype"),
    **{name: f"train.{name}" for name in _OPTIMIZER},
    **{name: f"megatron.{name}" for name in ("use_distributed_optimizer", "optimizer_cpu_offload", *_RECOMPUTE)},
}
"""Arguments that a setting controls, and that setting."""


@dataclass(frozen=True)
class Recompute:
    """Activation recomputation: "none", "selective" (the `modules`), or "full" (whole layers)."""

    granularity: str = "none"
    modules: tuple[str, ...] = ("core_attn",)


def field_names(kind: type) -> set[str]:
    """Names of the fields that the installed version of a configuration class accepts."""
    return {field.name for field in dataclasses.fields(kind) if field.init}


def check_args(args: Mapping[str, Any]) -> None:
    """Check the names in [megatron.args].

    Raises SettingsError for an argument that a setting controls, or that no class of megatron-core has; for the latter
    with the nearest name.
    """
    for name in (name for name in args if name in _SETTING_OF_ARG):
        raise SettingsError(f"megatron.args.{name}: is a setting of its own; set {_SETTING_OF_ARG[name]}")
    accepted = set().union(*(field_names(kind) for kind in ARGUMENT_CLASSES))
    for name in args:
        if name not in accepted:
            matches = difflib.get_close_matches(name, sorted(accepted), n=1)
            hint = f"; did you mean {matches[0]}?" if matches else "; see TransformerConfig of megatron-core"
            raise SettingsError(f"megatron.args.{name}: megatron-core has no such argument{hint}")


def _check_against_model(args: Mapping[str, Any], architecture: Architecture) -> None:
    """Raises SettingsError for an argument that would change the model, or that packed training depends on."""
    for name, value in args.items():
        if name in architecture.transformer and name not in _TUNABLE and value != architecture.transformer[name]:
            raise SettingsError(
                f"megatron.args.{name}: {value}, but the model's config.json makes it"
                f" {architecture.transformer[name]}; leave it out"
            )
        if name in _NEEDED and value != _ALWAYS[name]:
            raise SettingsError(
                f"megatron.args.{name}: {value}, but packed training needs {_ALWAYS[name]}; leave it out"
            )


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
    """Build the configuration of a model; `fields` override it, and the user's `args` override both.

    Raises SettingsError for an unknown argument, and for values that megatron-core refuses.
    """
    check_args(args or {})
    _check_against_model(args or {}, architecture)
    kind = MLATransformerConfig if architecture.mla else TransformerConfig
    values = {
        **_ALWAYS,
        **architecture.transformer,
        **_parallel_fields(layout),
        **_recompute_fields(recompute or Recompute()),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        **fields,
        **args_of(args or {}, kind),
    }
    if architecture.layer == "wide_qk_norm":
        # mcore sums gradients of query and key norms over tensor-parallel ranks; these are sharded, not replicated.
        values["qk_layernorm"] = False
    if architecture.mla:
        width = values["qk_head_dim"] + values["qk_pos_emb_head_dim"]
        values.setdefault("softmax_scale", softmax_scale(architecture.rope, width, architecture.max_positions))
    try:
        # Fields that the installed version lacks are optional ones of this module: users' are checked above.
        return kind(**args_of(values, kind))
    except (AssertionError, TypeError, ValueError) as error:
        raise SettingsError(f"megatron-core refuses the configuration: {' '.join(str(error).split())}") from error


_TUNABLE = {"hidden_dropout", "attention_dropout", "moe_aux_loss_coeff", "moe_router_bias_update_rate"}
"""Fields with a default from the architecture that training may override."""
_NEEDED = {"variable_seq_lengths", "calculate_per_token_loss", "moe_token_dispatcher_type", "add_bias_linear"}
"""Fields that the attention, batches and losses of this package depend on."""


def _skip_initialization(weight: Tensor) -> Tensor:
    """Skip initialization: weights are loaded afterwards. Not `perform_initialization=False`, with which mcore (0.16.1)
    also omits the attributes by which gradient norms recognise a sharded parameter."""
    return weight


_ALWAYS: dict[str, Any] = {
    "activation_func": F.silu,
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
    # Packed rows differ in length from one micro-batch to the next; the allgather dispatcher does not support that.
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "calculate_per_token_loss": True,
    # Its default is a deprecated value that warns.
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
        # Interleaved stages on two ranks exchange both ways with the same peer: one batch of messages mixes them up.
        "overlap_p2p_comm": layout.virtual_pipeline is not None,
        "batch_p2p_comm": layout.virtual_pipeline is None,
    }


def _recompute_fields(recompute: Recompute) -> dict[str, Any]:
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
