"""Qwen2, Qwen3 and MiMo: decoders, dense and with a mixture of experts."""

from __future__ import annotations

from typing import Any

from slimectl.architectures import blocks
from slimectl.architectures.config import Architecture, Config, Family, dense, require
from slimectl.architectures.mapping import ParamMapping


def qwen2_architecture(config: Config) -> Architecture:
    require(config)
    return dense(config, add_qkv_bias=True)


def qwen2_links(config: Config) -> list[ParamMapping]:
    def layer(i: int, mcore: str, hf: str) -> list[ParamMapping]:
        return [
            *blocks.attention(config, mcore, hf, bias=True),
            *blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"]),
            *blocks.norms(config, mcore, hf),
        ]

    return blocks.layered(config, layer)


QWEN2 = Family("qwen2", ("qwen2",), qwen2_architecture, qwen2_links)


def qwen3_architecture(config: Config) -> Architecture:
    require(config, attention_bias=False)
    return dense(config, qk_layernorm=True)


def qwen3_links(config: Config, decoder: str = "model") -> list[ParamMapping]:
    """Return the links of a dense model. `decoder` is the prefix of its tensors in Hugging Face's layout."""

    def layer(i: int, mcore: str, hf: str) -> list[ParamMapping]:
        return [
            *blocks.attention(config, mcore, hf, qk_norm=True),
            *blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"]),
            *blocks.norms(config, mcore, hf),
        ]

    return blocks.layered(config, layer, decoder)


QWEN3 = Family("qwen3", ("qwen3",), qwen3_architecture, qwen3_links)


MIMO = Family("mimo", ("mimo",), qwen2_architecture, qwen2_links, carried=(r"^model\.mtp_layers\.",))


def expert_count(config: Config) -> int:
    """Return the number of experts, for which transformers has two names."""
    return int(config["num_experts"] if "num_experts" in config else config["num_local_experts"])


def sparse_layers(config: Config) -> list[bool]:
    """Return for every layer whether it has experts."""
    dense_layers, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    return [i not in dense_layers and (i + 1) % step == 0 for i in range(config["num_hidden_layers"])]


def qwen2_moe_architecture(config: Config) -> Architecture:
    require(config)
    return dense(
        config,
        add_qkv_bias=config["qkv_bias"],
        **blocks.fields(
            config, experts=expert_count(config), ffn=config["moe_intermediate_size"], sparse=sparse_layers(config)
        ),
        **blocks.softmax_routing(normalized=config["norm_topk_prob"]),
        **shared_fields(config),
    )


def shared_fields(config: Config) -> dict[str, Any]:
    """Return mcore's fields for the gated shared expert."""
    return {
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


def mixture(config: Config, mcore: str, hf: str) -> list[ParamMapping]:
    """Return the links of a layer's router, routed experts and gated shared expert."""
    shared = f"{hf}.mlp.shared_expert"
    return [
        *blocks.routed(config, mcore, f"{hf}.mlp", experts=expert_count(config), ffn=config["moe_intermediate_size"]),
        *blocks.shared(config, mcore, shared, config["shared_expert_intermediate_size"], gate=f"{shared}_gate.weight"),
    ]


def qwen2_moe_links(config: Config) -> list[ParamMapping]:
    sparse = sparse_layers(config)

    def layer(i: int, mcore: str, hf: str) -> list[ParamMapping]:
        plain = blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"])
        return [
            *blocks.attention(config, mcore, hf, bias=config["qkv_bias"]),
            *(mixture(config, mcore, hf) if sparse[i] else plain),
            *blocks.norms(config, mcore, hf),
        ]

    return blocks.layered(config, layer)


QWEN2_MOE = Family("qwen2_moe", ("qwen2_moe",), qwen2_moe_architecture, qwen2_moe_links)


def qwen3_moe_architecture(config: Config) -> Architecture:
    require(config, attention_bias=False)
    return dense(
        config,
        qk_layernorm=True,
        **blocks.fields(
            config, experts=expert_count(config), ffn=config["moe_intermediate_size"], sparse=sparse_layers(config)
        ),
        **blocks.softmax_routing(normalized=config["norm_topk_prob"]),
    )


def qwen3_moe_links(config: Config) -> list[ParamMapping]:
    sparse = sparse_layers(config)

    def layer(i: int, mcore: str, hf: str) -> list[ParamMapping]:
        H = config["hidden_size"]
        if sparse[i]:
            mlp = blocks.routed(
                config, mcore, f"{hf}.mlp", experts=expert_count(config), ffn=config["moe_intermediate_size"]
            )
        else:
            mlp = blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", H, config["intermediate_size"])
        return [*blocks.attention(config, mcore, hf, qk_norm=True), *mlp, *blocks.norms(config, mcore, hf)]

    return blocks.layered(config, layer)


QWEN3_MOE = Family("qwen3_moe", ("qwen3_moe",), qwen3_moe_architecture, qwen3_moe_links)
