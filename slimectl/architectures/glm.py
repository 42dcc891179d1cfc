"""glm4: GLM-4-0414 and GLM-Z1, 9B and 32B; norms after attention and MLP too, interleaved rotary embedding."""

from __future__ import annotations

import dataclasses

from slimectl.architectures import blocks
from slimectl.architectures.blocks import same
from slimectl.architectures.config import Architecture, Config, dense, require, rope
from slimectl.architectures.family import Family
from slimectl.architectures.mapping import ParamMapping, TensorParallelSplit


def architecture(config: Config) -> Architecture:
    require(config)
    plain = dense(config, add_qkv_bias=config["attention_bias"], rotary_interleaved=True)
    return dataclasses.replace(plain, layer="sandwich", rope=rope(config, interleaved=True))


def links(config: Config) -> list[ParamMapping]:
    H, F = config["hidden_size"], config["intermediate_size"]

    def layer(i: int, mcore: str, hf: str) -> list[ParamMapping]:
        post_norms = ("post_self_attn_layernorm", "post_mlp_layernorm")
        fused = same(
            f"{mcore}.mlp.linear_fc1.weight",
            f"{hf}.mlp.gate_up_proj.weight",
            2 * F,
            H,
            split=TensorParallelSplit(0, (F, F)),
        )
        return [
            *blocks.attention(config, mcore, hf, bias=config["attention_bias"]),
            fused,
            same(f"{mcore}.mlp.linear_fc2.weight", f"{hf}.mlp.down_proj.weight", H, F, split=TensorParallelSplit(1)),
            *blocks.norms(config, mcore, hf),
            *(same(f"{mcore}.{norm}.weight", f"{hf}.{norm}.weight", H) for norm in post_norms),
        ]

    return blocks.layered(config, layer)


FAMILY = Family("glm4", ("glm4",), architecture, links)
