"""minimax_m2: MiniMax-M2; query and key normalised over all heads together, every layer of experts."""

from __future__ import annotations

import dataclasses

from slimectl.weights import blocks, moe
from slimectl.weights.architecture import Architecture, Config, dense, head_dim, refuse, rope
from slimectl.weights.blocks import same
from slimectl.weights.family import Family
from slimectl.weights.links import Link, Split
from slimectl.weights.qwen2_moe import experts


def architecture(config: Config) -> Architecture:
    refuse(config, attention_bias=False)
    everywhere = [True] * config["num_hidden_layers"]
    plain = dense(
        config,
        qk_layernorm=True,
        **moe.fields(
            config,
            experts=experts(config),
            ffn=config["intermediate_size"],
            sparse=everywhere,
        ),
        **moe.sigmoid_routing(config),
    )
    # Published configurations give the rotated width as rotary_dim alone.
    percent = config.get("rotary_dim", head_dim(config)) / head_dim(config)
    return dataclasses.replace(plain, layer="wide_qk_norm", rope=rope(config, percent=percent))


def links(config: Config) -> list[Link]:
    D, heads, groups = head_dim(config), config["num_attention_heads"], config["num_key_value_heads"]

    def layer(i: int, mcore: str, hf: str) -> list[Link]:
        attention = f"{mcore}.self_attention"
        return [
            *blocks.attention(config, mcore, hf),
            same(f"{attention}.q_layernorm.weight", f"{hf}.self_attn.q_norm.weight", heads * D, split=Split(0)),
            same(f"{attention}.k_layernorm.weight", f"{hf}.self_attn.k_norm.weight", groups * D, split=Split(0)),
            *moe.routed(
                config, mcore, f"{hf}.block_sparse_moe", experts=experts(config), ffn=config["intermediate_size"],
                bias="e_score_correction_bias", names=("w1", "w3", "w2"),
            ),
            *blocks.norms(config, mcore, hf),
        ]  # fmt: skip

    return blocks.layered(config, layer)


FAMILY = Family("minimax_m2", ("minimax_m2",), architecture, links)
