"""glm4: GLM-4-0414 and GLM-Z1, 9B and 32B; norms after attention and MLP too, interleaved rotary embedding."""

from __future__ import annotations

import dataclasses

from slimectl.weights import blocks
from slimectl.weights.architecture import Architecture, Config, dense, refuse, rope
from slimectl.weights.blocks import same
from slimectl.weights.family import Family
from slimectl.weights.links import Link, Split


def architecture(config: Config) -> Architecture:
    refuse(config)
    plain = dense(config, add_qkv_bias=config["attention_bias"], rotary_interleaved=True)
    return dataclasses.replace(plain, layer="sandwich", rope=rope(config, interleaved=True))


def links(config: Config) -> list[Link]:
    H, F = config["hidden_size"], config["intermediate_size"]

    def layer(i: int, mcore: str, hf: str) -> list[Link]:
        post_norms = ("post_self_attn_layernorm", "post_mlp_layernorm")
        fused = same(
            f"{mcore}.mlp.linear_fc1.weight", f"{hf}.mlp.gate_up_proj.weight", 2 * F, H, split=Split(0, (F, F))
        )
        return [
            *blocks.attention(config, mcore, hf, bias=config["attention_bias"]),
            fused,
            same(f"{mcore}.mlp.linear_fc2.weight", f"{hf}.mlp.down_proj.weight", H, F, split=Split(1)),
            *blocks.norms(config, mcore, hf),
            *(same(f"{mcore}.{norm}.weight", f"{hf}.{norm}.weight", H) for norm in post_norms),
        ]

    return blocks.layered(config, layer)


FAMILY = Family("glm4", ("glm4",), architecture, links)
