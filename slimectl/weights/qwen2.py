"""qwen2: Qwen2, Qwen2.5; biases on query, key and value."""

from __future__ import annotations

from slimectl.weights import blocks
from slimectl.weights.architecture import Architecture, Config, dense, refuse
from slimectl.weights.family import Family
from slimectl.weights.links import Link


def architecture(config: Config) -> Architecture:
    refuse(config)
    return dense(config, add_qkv_bias=True)


def links(config: Config) -> list[Link]:
    def layer(i: int, mcore: str, hf: str) -> list[Link]:
        return [
            *blocks.attention(config, mcore, hf, bias=True),
            *blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"]),
            *blocks.norms(config, mcore, hf),
        ]

    return blocks.layered(config, layer)


FAMILY = Family("qwen2", ("qwen2",), architecture, links)
