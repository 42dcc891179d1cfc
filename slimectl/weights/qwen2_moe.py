"""qwen2_moe: Qwen1.5-MoE, Qwen2-57B-A14B; Qwen2's attention, routed experts and a gated shared one."""

from __future__ import annotations

from typing import Any

from slimectl.weights import blocks, moe
from slimectl.weights.architecture import Architecture, Config, dense, refuse
from slimectl.weights.family import Family
from slimectl.weights.links import Link


def experts(config: Config) -> int:
    """Number of experts; transformers has two names for it."""
    return int(config["num_experts"] if "num_experts" in config else config["num_local_experts"])


def sparse_layers(config: Config) -> list[bool]:
    """Flag for every layer: whether it has experts."""
    dense_layers, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    return [i not in dense_layers and (i + 1) % step == 0 for i in range(config["num_hidden_layers"])]


def architecture(config: Config) -> Architecture:
    refuse(config)
    return dense(
        config,
        add_qkv_bias=config["qkv_bias"],
        **moe.fields(
            config, experts=experts(config), ffn=config["moe_intermediate_size"], sparse=sparse_layers(config)
        ),
        **moe.softmax_routing(normalized=config["norm_topk_prob"]),
        **shared_fields(config),
    )


def shared_fields(config: Config) -> dict[str, Any]:
    """Fields of mcore for the gated shared expert."""
    return {
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


def mixture(config: Config, mcore: str, hf: str) -> list[Link]:
    """Links of router, routed experts and the gated shared expert of a layer."""
    shared = f"{hf}.mlp.shared_expert"
    return [
        *moe.routed(config, mcore, f"{hf}.mlp", experts=experts(config), ffn=config["moe_intermediate_size"]),
        *moe.shared(config, mcore, shared, config["shared_expert_intermediate_size"], gate=f"{shared}_gate.weight"),
    ]


def links(config: Config) -> list[Link]:
    sparse = sparse_layers(config)

    def layer(i: int, mcore: str, hf: str) -> list[Link]:
        plain = blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"])
        return [
            *blocks.attention(config, mcore, hf, bias=config["qkv_bias"]),
            *(mixture(config, mcore, hf) if sparse[i] else plain),
            *blocks.norms(config, mcore, hf),
        ]

    return blocks.layered(config, layer)


FAMILY = Family("qwen2_moe", ("qwen2_moe",), architecture, links)
