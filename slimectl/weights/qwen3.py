"""qwen3: Qwen3 dense; every head of query and key is normalised."""

from __future__ import annotations

from slimectl.weights import blocks
from slimectl.weights.architecture import Architecture, Config, dense, refuse
from slimectl.weights.family import Family
from slimectl.weights.links import Link


def architecture(config: Config) -> Architecture:
    refuse(config, attention_bias=False)
    return dense(config, qk_layernorm=True)


def links(config: Config) -> list[Link]:
    def layer(i: int, mcore: str, hf: str) -> list[Link]:
        return [
            *blocks.attention(config, mcore, hf, qk_norm=True),
            *blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"]),
            *blocks.norms(config, mcore, hf),
        ]

    return blocks.layered(config, layer)


FAMILY = Family("qwen3", ("qwen3",), architecture, links)
