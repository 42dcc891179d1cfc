"""An architecture and a layout as mcore's TransformerConfig."""

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

from slimectl.errors import SettingsError
from slimectl.layouts import SETTINGS, ParallelLayout
from slimectl.policies.megatron.rotary import softmax_scale
from slimectl.weights.architecture import Architecture

ARGUMENT_CLASSES = (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
"""Whose fields [megatron.args] may name."""

_OPTIMIZER = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
_RECOMPUTE = ("recompute_granularity", "recompute_modules")
_OWN_SETTINGS = {setting.removeprefix("megatron."): setting for setting in SETTINGS.values()} | {
    "sequence_parallel": SETTINGS["tensor"],
    **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype"), "train.dtype"),
    **{name: f"train.{name}" for name in _OPTIMIZER},
    **{name: f"megatron.{name}" for name in ("use_distributed_optimizer", "optimizer_cpu_offload", *_RECOMPUTE)},
}
"""Arguments that would contradict a setting, and that setting."""


@dataclass(frozen=True)
class Recompute:
    """What the backward pass computes again: "none", the "selective" `modules`, or whole layers ("full")."""

    granularity: str = "none"
    modules: tuple[str, ...] = ("core_attn",)


def field_names(kind: type) -> set[str]:
    """What the installed version of a configuration class can be given."""
    return {field.name for field in dataclasses.fields(kind) if field.init}


def check_args(args: Mapping[str, Any]) -> None:
    """Raises SettingsError for an argument that is a setting of its own, or that no class of megatron-core takes; the
    latter with the nearest name."""
    for name in (name for name in args if name in _OWN_SETTINGS):
        raise SettingsError(f"megatron.args.{name}: is a setting of its own; set {_OWN_SETTINGS[name]}")
    known = set().union(*(field_names(kind) for kind in ARGUMENT_CLASSES))
    for name in args:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {near[0]}?" if near else "; see TransformerConfig of megatron-core"
            raise SettingsError(f"megatron.args.{name}: megatron-core has no such argument{hint}")


def _check_against_model(args: Mapping[str, Any], architecture: Architecture) -> None:
    """Raises SettingsError for an argument that would make it another model, or that packed training stands on."""
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
    """The arguments that `kind` takes."""
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
    """The configuration of a model; `fields` and then the user's `args` have the last word.

    Raises SettingsError for an unknown argument, and for values that megatron-core refuses.
    """
    check_args(args or {})
    _check_against_model(args or {}, architecture)
    kind = MLATransformerConfig if architecture.mla else TransformerConfig
    values = {
        **_ALWAYS,
        **architecture.transformer,
        **_parallel(layout),
        **_recomputed(recompute or Recompute()),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        **fields,
        **args_of(args or {}, kind),
    }
    if architecture.layer == "wide_qk_norm":
        # mcore adds up gradients of query and key norms over tensor-parallel ranks; these norms are cut, not copied.
        values["qk_layernorm"] = False
    if architecture.mla:
        width = values["qk_head_dim"] + values["qk_pos_emb_head_dim"]
        values.setdefault("softmax_scale", softmax_scale(architecture.rope, width, architecture.max_positions))
    try:
        # Fields that the installed version does not have are optional ones of ours: users' are checked above.
        return kind(**args_of(values, kind))
    except (AssertionError, TypeError, ValueError) as error:
        raise SettingsError(f"megatron-core refuses the configuration: {' '.join(str(error).split())}") from error


_TUNABLE = {"hidden_dropout", "attention_dropout", "moe_aux_loss_coeff", "moe_router_bias_update_rate"}
"""What a model's architecture suggests and training may choose."""
_NEEDED = {"variable_seq_lengths", "calculate_per_token_loss", "moe_token_dispatcher_type", "add_bias_linear"}
"""What this package's attention, batches and losses are written for."""


def _as_allocated(weight: Tensor) -> Tensor:
    """No initial values: weights are loaded afterwards. Not `perform_initialization=False`, with which mcore (0.16.1)
    also leaves out the marks by which gradient norms know a cut parameter."""
    return weight


_ALWAYS: dict[str, Any] = {
    "activation_func": F.silu,
    "init_method": _as_allocated,
    "output_layer_init_method": _as_allocated,
    "embedding_init_method": _as_allocated,
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
    # Packed rows differ in length from one micro-batch to the next; the allgather dispatcher cannot have that.
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "calculate_per_token_loss": True,
    # Its default is a deprecated value that warns.
    "cuda_graph_scope": [],
}


def _parallel(layout: ParallelLayout) -> dict[str, Any]:
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


def _recomputed(recompute: Recompute) -> dict[str, Any]:
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
