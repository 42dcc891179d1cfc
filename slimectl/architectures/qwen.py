"""Qwen2, Qwen3 and MiMo: dense decoders."""

from __future__ import annotations

from slimectl.architectures import blocks
from slimectl.architectures.config import Architecture, Config, dense, require
from slimectl.architectures.family import Family
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


def qwen3_links(config: Config) -> list[ParamMapping]:
    def layer(i: int, mcore: str, hf: str) -> list[ParamMapping]:
        return [
            *blocks.attention(config, mcore, hf, qk_norm=True),
            *blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"]),
            *blocks.norms(config, mcore, hf),
        ]

    return blocks.layered(config, layer)


QWEN3 = Family("qwen3", ("qwen3",), qwen3_architecture, qwen3_links)


MIMO = Family("mimo", ("mimo",), qwen2_architecture, qwen2_links, carried=(r"^model\.mtp_layers\.",))
