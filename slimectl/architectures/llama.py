"""llama: Llama 2, 3, 3.1, 3.2, SmolLM2, and other models of the same layout."""

from __future__ import annotations

from slimectl.architectures import blocks
from slimectl.architectures.config import Architecture, Config, Family, dense, require
from slimectl.architectures.mapping import ParamMapping


def architecture(config: Config) -> Architecture:
    require(config, attention_bias=False, mlp_bias=False)
    return dense(config)


def links(config: Config) -> list[ParamMapping]:
    def layer(i: int, mcore: str, hf: str) -> list[ParamMapping]:
        return [
            *blocks.attention(config, mcore, hf),
            *blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"]),
            *blocks.norms(config, mcore, hf),
        ]

    return blocks.layered(config, layer)


FAMILY = Family("llama", ("llama",), architecture, links, carried=(r"rotary_emb\.inv_freq$",))
