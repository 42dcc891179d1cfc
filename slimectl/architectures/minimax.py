"""minimax_m2 (MiniMax-M2): query and key normalized over all heads together, experts in every layer."""

from __future__ import annotations

import dataclasses

from slimectl.architectures import blocks
from slimectl.architectures.blocks import same
from slimectl.architectures.config import Architecture, Config, Family, dense, head_dim, require, rope
from slimectl.architectures.mapping import ParamMapping, TensorParallelSplit
from slimectl.architectures.qwen import expert_count


def architecture(config: Config) -> Architecture:
    require(config, attention_bias=False)
    everywhere = [True] * config["num_hidden_layers"]
    plain = dense(
        config,
        qk_layernorm=True,
        **blocks.fields(
            config,
            experts=expert_count(config),
            ffn=config["intermediate_size"],
            sparse=everywhere,
        ),
        **blocks.sigmoid_routing(config),
    )
    # Published configurations give the rotated width only as rotary_dim.
    percent = config.get("rotary_dim", head_dim(config)) / head_dim(config)
    return dataclasses.replace(plain, layer="wide_qk_norm", rope=rope(config, percent=percent))


def links(config: Config) -> list[ParamMapping]:
    D, heads, groups = head_dim(config), config["num_attention_heads"], config["num_key_value_heads"]

    def layer(i: int, mcore: str, hf: str) -> list[ParamMapping]:
        attention = f"{mcore}.self_attention"
        by_head = TensorParallelSplit(0)
        return [
            *blocks.attention(config, mcore, hf),
            same(f"{attention}.q_layernorm.weight", f"{hf}.self_attn.q_norm.weight", heads * D, split=by_head),
            same(f"{attention}.k_layernorm.weight", f"{hf}.self_attn.k_norm.weight", groups * D, split=by_head),
            *blocks.routed(
                config, mcore, f"{hf}.block_sparse_moe", experts=expert_count(config), ffn=config["intermediate_size"],
                bias="e_score_correction_bias", names=("w1", "w3", "w2"),
            ),
            *blocks.norms(config, mcore, hf),
        ]  # fmt: skip

    return blocks.layered(config, layer)


FAMILY = Family("minimax_m2", ("minimax_m2",), architecture, links)
