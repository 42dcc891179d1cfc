"""llama: Llama 2, 3, 3.1, 3.2, SmolLM2, and other models of the same layout."""

from __future__ import annotations

from slimectl.weights import blocks
from slimectl.weights.architecture import Architecture, Config, dense, refuse
from slimectl.weights.family import Family
from slimectl.weights.links import Link


def architecture(config: Config) -> Architecture:
    refuse(config, attention_bias=False, mlp_bias=False)
    return dense(config)


def links(config: Config) -> list[Link]:
    def layer(i: int, mcore: str, hf: str) -> list[Link]:
        return [
            *blocks.attention(config, mcore, hf),
            *blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"]),
            *blocks.norms(config, mcore, hf),
        ]

    return blocks.layered(config, layer)


FAMILY = Family("llama", ("llama",), architecture, links, carried=(r"rotary_emb\.inv_freq$",))
