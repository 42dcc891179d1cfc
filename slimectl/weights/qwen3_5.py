"""qwen3_5 and qwen3_5_moe: the language models of Qwen3.5; Qwen3-Next's layers, dense or with experts.

A checkpoint with a vision tower keeps the language model below model.language_model, its configuration in text_config;
the tower is copied unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

from slimectl.weights import blocks, delta, moe
from slimectl.weights.architecture import Architecture, Config
from slimectl.weights.family import Family
from slimectl.weights.joins import Rows
from slimectl.weights.links import Link
from slimectl.weights.qwen2_moe import experts, mixture, shared_fields


def text(config: Config) -> Config:
    """Return the language model's part of a configuration."""
    if "text_config" not in config:
        return config
    return {**config["text_config"], "tie_word_embeddings": config.get("tie_word_embeddings")}


def decoder(config: Config) -> str:
    """Prefix of the decoder's tensor names."""
    return "model.language_model" if "text_config" in config else "model"


def projection(config: Config, mcore: str, hf: str) -> Link:
    """Link of the input projection from [q | k | v], z, b and a."""
    net = delta.sizes(config)
    names = tuple(f"{hf}.linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    rows = (sum(net.blocks[:3]), *net.blocks[3:])
    return delta.projection(config, mcore, names, rows, Rows())


def architecture(config: Config) -> Architecture:
    return delta.architecture(text(config))


def _links(config: Config, mlp: Callable[[Config, str, str], list[Link]]) -> list[Link]:
    text_config = text(config)
    return delta.links(
        text_config,
        lambda _, mcore, hf: [projection(text_config, mcore, hf)],
        lambda _, mcore, hf: mlp(text_config, mcore, hf),
        decoder(config),
    )


def links(config: Config) -> list[Link]:
    def mlp(text_config: Config, mcore: str, hf: str) -> list[Link]:
        return blocks.gated_mlp(
            f"{mcore}.mlp", f"{hf}.mlp", text_config["hidden_size"], text_config["intermediate_size"]
        )

    return _links(config, mlp)


def moe_architecture(config: Config) -> Architecture:
    config = text(config)
    everywhere, ffn = [True] * config["num_hidden_layers"], config["moe_intermediate_size"]
    return delta.architecture(
        {**config, "intermediate_size": ffn},
        **moe.fields(config, experts=experts(config), ffn=ffn, sparse=everywhere),
        **moe.softmax_routing(normalized=True),
        **shared_fields(config),
    )


def moe_links(config: Config) -> list[Link]:
    return _links(config, mixture)


CARRIED = (r"^mtp\.", r"^model\.visual\.")

FAMILY = Family("qwen3_5", ("qwen3_5", "qwen3_5_text"), architecture, links, CARRIED)
MOE = Family("qwen3_5_moe", ("qwen3_5_moe", "qwen3_5_moe_text"), moe_architecture, moe_links, CARRIED)
