"""Mixtures of experts: the router's fields, and the links of router, routed and shared experts."""

from __future__ import annotations

from typing import Any

from slimectl.errors import CheckpointError
from slimectl.weights.architecture import Config
from slimectl.weights.blocks import MLP_NAMES, gated_mlp, same
from slimectl.weights.links import Link


def fields(config: Config, *, experts: int, ffn: int, sparse: list[bool]) -> dict[str, Any]:
    """Fields of every mixture of experts; `sparse` flags its layers.

    moe_layer_freq is set only if some layers are dense: mcore then gives each layer keys of its own in a checkpoint.
    """
    pattern = {} if all(sparse) else {"moe_layer_freq": [int(layer) for layer in sparse]}
    coefficient = config.get("router_aux_loss_coef") if config.get("output_router_logits") else None
    return {
        **pattern,
        "num_moe_experts": experts,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": ffn,
        "moe_aux_loss_coeff": coefficient or 0.0,
    }


def softmax_routing(*, normalized: bool) -> dict[str, Any]:
    """Router weights: softmax over all experts, or if `normalized`, over the selected ones (softmax after top-k)."""
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not normalized}


def sigmoid_routing(config: Config) -> dict[str, Any]:
    """Router of DeepSeek-V3 (arXiv:2412.19437, eq. 12-16): sigmoid scores, a bias for the selection only, weights that
    sum to the scaling factor, and with groups, experts of the best groups only.

    The bias is constant in training, as in the Hugging Face model; set moe_router_bias_update_rate to update it.
    Raises CheckpointError if Megatron would select or weigh differently.
    """
    groups, best, topk = config.get("n_group") or 1, config.get("topk_group") or 1, config["num_experts_per_tok"]
    if not config.get("norm_topk_prob", True):
        raise CheckpointError(
            "config.json: norm_topk_prob false: Megatron's sigmoid router always normalizes; this model cannot be"
            " trained or converted"
        )
    if groups > 1 and topk != 2 * best:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {topk} over topk_group {best}: Megatron ranks groups by their best"
            f" {topk // best} experts, this model by the best 2; it cannot be trained or converted"
        )
    scaling = config.get("routed_scaling_factor") or 1.0
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": None if scaling == 1.0 else float(scaling),
        **({"moe_router_num_groups": groups, "moe_router_group_topk": best} if groups > 1 else {}),
    }


def routed(
    config: Config,
    mcore: str,
    hf: str,
    *,
    experts: int,
    ffn: int,
    bias: str | None = None,
    names: tuple[str, ...] = MLP_NAMES,
) -> list[Link]:
    """Links of router and experts; `hf` is the prefix of the mixture, `bias` the name of the router's bias below it."""
    H = config["hidden_size"]
    links = [same(f"{mcore}.mlp.router.weight", f"{hf}.gate.weight", experts, H)]
    if bias:
        links.append(same(f"{mcore}.mlp.router.expert_bias", f"{hf}.{bias}", experts))
    for e in range(experts):
        links += gated_mlp(f"{mcore}.mlp.experts.local_experts.{e}", f"{hf}.experts.{e}", H, ffn, names)
    return links


def shared(config: Config, mcore: str, hf: str, ffn: int, *, gate: str | None = None) -> list[Link]:
    """Links of the shared expert; `hf` is the prefix of its MLP, `gate` the matrix [1, H] that weighs it."""
    links = gated_mlp(f"{mcore}.mlp.shared_experts", hf, config["hidden_size"], ffn)
    if gate:
        links.append(same(f"{mcore}.mlp.shared_experts.gate_weight", gate, 1, config["hidden_size"]))
    return links
