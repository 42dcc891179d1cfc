"""glm4_moe: GLM-4.5, 4.6, 4.7; grouped-query attention, DeepSeek-V3's experts."""

from __future__ import annotations

from slimectl.weights import blocks, moe
from slimectl.weights.architecture import Architecture, Config, dense, refuse
from slimectl.weights.deepseek_v3 import mixture, shared_fields, sparse_layers
from slimectl.weights.family import Family
from slimectl.weights.links import Link


def architecture(config: Config) -> Architecture:
    refuse(config)
    ffn = config["moe_intermediate_size"]
    return dense(
        config,
        add_qkv_bias=config["attention_bias"],
        qk_layernorm=config["use_qk_norm"],
        **moe.fields(config, experts=config["n_routed_experts"], ffn=ffn, sparse=sparse_layers(config)),
        **moe.sigmoid_routing(config),
        **shared_fields(config),
    )


def links(config: Config) -> list[Link]:
    sparse = sparse_layers(config)

    def layer(i: int, mcore: str, hf: str) -> list[Link]:
        plain = blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"])
        return [
            *blocks.attention(config, mcore, hf, bias=config["attention_bias"], qk_norm=config["use_qk_norm"]),
            *(mixture(config, mcore, hf) if sparse[i] else plain),
            *blocks.norms(config, mcore, hf),
        ]

    return blocks.layered(config, layer)


FAMILY = Family("glm4_moe", ("glm4_moe",), architecture, links, spare_layers=True)
