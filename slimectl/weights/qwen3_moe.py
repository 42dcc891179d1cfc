"""qwen3_moe: Qwen3's attention; routed experts without a shared one."""

from __future__ import annotations

from slimectl.weights import blocks, moe
from slimectl.weights.architecture import Architecture, Config, dense, refuse
from slimectl.weights.family import Family
from slimectl.weights.links import Link
from slimectl.weights.qwen2_moe import experts, sparse_layers


def architecture(config: Config) -> Architecture:
    refuse(config, attention_bias=False)
    return dense(
        config,
        qk_layernorm=True,
        **moe.fields(
            config, experts=experts(config), ffn=config["moe_intermediate_size"], sparse=sparse_layers(config)
        ),
        **moe.softmax_routing(normalized=config["norm_topk_prob"]),
    )


def links(config: Config) -> list[Link]:
    sparse = sparse_layers(config)

    def layer(i: int, mcore: str, hf: str) -> list[Link]:
        H = config["hidden_size"]
        if sparse[i]:
            mlp = moe.routed(config, mcore, f"{hf}.mlp", experts=experts(config), ffn=config["moe_intermediate_size"])
        else:
            mlp = blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", H, config["intermediate_size"])
        return [*blocks.attention(config, mcore, hf, qk_norm=True), *mlp, *blocks.norms(config, mcore, hf)]

    return blocks.layered(config, layer)


FAMILY = Family("qwen3_moe", ("qwen3_moe",), architecture, links)
