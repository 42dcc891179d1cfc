"""Qwen3-Next and Qwen3.5: gated delta nets alternating with gated attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from slimectl.architectures import blocks
from slimectl.architectures.blocks import same
from slimectl.architectures.config import Architecture, Config, Family, dense, head_dim, require
from slimectl.architectures.mapping import (
    ConcatRows,
    Deinterleave,
    InterleaveGatedGroups,
    Merge,
    ParamMapping,
    Shape,
    TensorParallelSplit,
)
from slimectl.architectures.qwen import expert_count, mixture, shared_fields, sparse_layers

Part = Callable[[int, str, str], list[ParamMapping]]
"""(layer index, its Megatron prefix, its Hugging Face prefix) -> links of a part of the layer."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Heads and widths of a gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return the rows of query, key, value, z, beta and alpha in Megatron's input projection."""
        return (self.keys, self.keys, self.values, self.values, self.value_heads, self.value_heads)


def sizes(config: Config) -> Sizes:
    return Sizes(
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
    )


def is_linear(config: Config, layer: int) -> bool:
    return bool(config["layer_types"][layer] == "linear_attention")


def delta_architecture(config: Config, **fields: Any) -> Architecture:
    """Return the architecture of `dense`, with linear attention in the layers that layer_types marks."""
    require(config, attention_bias=False)
    plain = dense(
        config,
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(is_linear(config, i)) for i in range(config["num_hidden_layers"])],
        linear_conv_kernel_dim=config["linear_conv_kernel_dim"],
        linear_key_head_dim=config["linear_key_head_dim"],
        linear_value_head_dim=config["linear_value_head_dim"],
        linear_num_key_heads=config["linear_num_key_heads"],
        linear_num_value_heads=config["linear_num_value_heads"],
        **fields,
    )
    return dataclasses.replace(plain, layer="gated_delta")


def delta_links(config: Config, projections: Part, mlp: Part, hf: str = "model") -> list[ParamMapping]:
    """Return the links of a model. `projections` gives the input projections, which families store differently."""

    def layer(i: int, mcore: str, name: str) -> list[ParamMapping]:
        if is_linear(config, i):
            attention = [*projections(i, mcore, name), *delta_net(config, mcore, name)]
        else:
            attention = gated_attention(config, mcore, name)
        return [*attention, *mlp(i, mcore, name), *blocks.norms(config, mcore, name)]

    return blocks.layered(config, layer, hf)


def delta_projection(
    config: Config, mcore: str, hf: tuple[str, ...], rows: tuple[int, ...], join: Merge
) -> ParamMapping:
    """Return the link of the input projection to query, key, value, z, beta and alpha.

    `hf` are its tensors, with `rows` rows.
    """
    shapes: tuple[Shape, ...] = tuple((count, config["hidden_size"]) for count in rows)
    return ParamMapping(
        f"{mcore}.self_attention.in_proj.weight", hf, shapes, join, TensorParallelSplit(0, sizes(config).blocks)
    )


def delta_net(config: Config, mcore: str, hf: str) -> list[ParamMapping]:
    """Return the links of a delta net, except its input projections."""
    net, kernel = sizes(config), config["linear_conv_kernel_dim"]
    mcore, hf = f"{mcore}.self_attention", f"{hf}.linear_attn"
    conv = net.blocks[:3]
    return [
        same(f"{mcore}.conv1d.weight", f"{hf}.conv1d.weight", sum(conv), 1, kernel, split=TensorParallelSplit(0, conv)),
        same(f"{mcore}.A_log", f"{hf}.A_log", net.value_heads, split=TensorParallelSplit(0)),
        same(f"{mcore}.dt_bias", f"{hf}.dt_bias", net.value_heads, split=TensorParallelSplit(0)),
        same(f"{mcore}.out_norm.weight", f"{hf}.norm.weight", net.value_dim),
        same(
            f"{mcore}.out_proj.weight",
            f"{hf}.out_proj.weight",
            config["hidden_size"],
            net.values,
            split=TensorParallelSplit(1),
        ),
    ]


def gated_attention(config: Config, mcore: str, hf: str) -> list[ParamMapping]:
    """Return the links of grouped-query attention with normalized heads, whose query projection includes gates."""
    D, groups = head_dim(config), config["num_key_value_heads"]
    plain = blocks.attention(config, mcore, hf, qk_norm=True)
    (q, H), *kv_shapes = plain[0].shapes
    fused = dataclasses.replace(plain[0], shapes=((2 * q, H), *kv_shapes), join=InterleaveGatedGroups(groups, D))
    return [fused, *plain[1:]]


def qwen3_next_architecture(config: Config) -> Architecture:
    return delta_architecture(
        config,
        **blocks.fields(
            config, experts=expert_count(config), ffn=config["moe_intermediate_size"], sparse=sparse_layers(config)
        ),
        **blocks.softmax_routing(normalized=config["norm_topk_prob"]),
        **shared_fields(config),
    )


def qwen3_next_projection(config: Config, mcore: str, hf: str) -> ParamMapping:
    """Return the link of the input projection from [q | k | v | z] and [b | a] of each key head."""
    net = sizes(config)
    share = net.value_heads // net.key_heads
    values = share * net.value_dim
    bands = ((net.key_dim, net.key_dim, values, values), (share, share))
    names = (f"{hf}.linear_attn.in_proj_qkvz.weight", f"{hf}.linear_attn.in_proj_ba.weight")
    rows = tuple(net.key_heads * sum(band) for band in bands)
    return delta_projection(config, mcore, names, rows, Deinterleave(net.key_heads, bands))


def qwen3_next_links(config: Config) -> list[ParamMapping]:
    sparse = sparse_layers(config)

    def mlp(i: int, mcore: str, hf: str) -> list[ParamMapping]:
        if sparse[i]:
            return mixture(config, mcore, hf)
        return blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"])

    return delta_links(config, lambda _, mcore, hf: [qwen3_next_projection(config, mcore, hf)], mlp)


QWEN3_NEXT = Family("qwen3_next", ("qwen3_next",), qwen3_next_architecture, qwen3_next_links, carried=(r"^mtp\.",))


def text(config: Config) -> Config:
    """Return the language model's part of a configuration."""
    if "text_config" not in config:
        return config
    return {**config["text_config"], "tie_word_embeddings": config.get("tie_word_embeddings")}


def decoder(config: Config) -> str:
    """Return the prefix of the decoder's tensor names."""
    return "model.language_model" if "text_config" in config else "model"


def qwen3_5_projection(config: Config, mcore: str, hf: str) -> ParamMapping:
    """Return the link of the input projection from [q | k | v], z, b and a."""
    net = sizes(config)
    names = tuple(f"{hf}.linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    rows = (sum(net.blocks[:3]), *net.blocks[3:])
    return delta_projection(config, mcore, names, rows, ConcatRows())


def qwen3_5_architecture(config: Config) -> Architecture:
    return delta_architecture(text(config))


def _links(config: Config, mlp: Callable[[Config, str, str], list[ParamMapping]]) -> list[ParamMapping]:
    text_config = text(config)
    return delta_links(
        text_config,
        lambda _, mcore, hf: [qwen3_5_projection(text_config, mcore, hf)],
        lambda _, mcore, hf: mlp(text_config, mcore, hf),
        decoder(config),
    )


def qwen3_5_links(config: Config) -> list[ParamMapping]:
    def mlp(text_config: Config, mcore: str, hf: str) -> list[ParamMapping]:
        return blocks.gated_mlp(
            f"{mcore}.mlp", f"{hf}.mlp", text_config["hidden_size"], text_config["intermediate_size"]
        )

    return _links(config, mlp)


def qwen3_5_moe_architecture(config: Config) -> Architecture:
    config = text(config)
    everywhere, ffn = [True] * config["num_hidden_layers"], config["moe_intermediate_size"]
    return delta_architecture(
        {**config, "intermediate_size": ffn},
        **blocks.fields(config, experts=expert_count(config), ffn=ffn, sparse=everywhere),
        **blocks.softmax_routing(normalized=True),
        **shared_fields(config),
    )


def qwen3_5_moe_links(config: Config) -> list[ParamMapping]:
    return _links(config, mixture)


CARRIED = (r"^mtp\.", r"^model\.visual\.")

QWEN3_5 = Family("qwen3_5", ("qwen3_5", "qwen3_5_text"), qwen3_5_architecture, qwen3_5_links, CARRIED)
QWEN3_5_MOE = Family(
    "qwen3_5_moe", ("qwen3_5_moe", "qwen3_5_moe_text"), qwen3_5_moe_architecture, qwen3_5_moe_links, CARRIED
)
