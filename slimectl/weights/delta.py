"""Gated delta nets and attention with a gated output: the layers of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from slimectl.weights import blocks
from slimectl.weights.architecture import Architecture, Config, dense, head_dim, refuse
from slimectl.weights.blocks import same
from slimectl.weights.joins import GatedGroupedRows, Join, Shape
from slimectl.weights.links import Link, Split

Part = Callable[[int, str, str], list[Link]]
"""(index of a layer, its Megatron prefix, its Hugging Face prefix) -> links of a part of the layer."""


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
        """Rows of query, key, value, z, beta and alpha in Megatron's input projection."""
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


def architecture(config: Config, **fields: Any) -> Architecture:
    """Architecture of `dense`, with linear attention in the layers that layer_types names."""
    refuse(config, attention_bias=False)
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


def links(config: Config, projections: Part, mlp: Part, hf: str = "model") -> list[Link]:
    """Links of a model; `projections` are those into a delta net, which families store differently."""

    def layer(i: int, mcore: str, name: str) -> list[Link]:
        if is_linear(config, i):
            attention = [*projections(i, mcore, name), *delta_net(config, mcore, name)]
        else:
            attention = gated_attention(config, mcore, name)
        return [*attention, *mlp(i, mcore, name), *blocks.norms(config, mcore, name)]

    return blocks.layered(config, layer, hf)


def projection(config: Config, mcore: str, hf: tuple[str, ...], rows: tuple[int, ...], join: Join) -> Link:
    """Link of the input projection to query, key, value, z, beta and alpha; `hf` are its tensors, of `rows` rows."""
    shapes: tuple[Shape, ...] = tuple((count, config["hidden_size"]) for count in rows)
    return Link(f"{mcore}.self_attention.in_proj.weight", hf, shapes, join, Split(0, sizes(config).blocks))


def delta_net(config: Config, mcore: str, hf: str) -> list[Link]:
    """Links of a delta net, except its input projections."""
    net, kernel = sizes(config), config["linear_conv_kernel_dim"]
    mcore, hf = f"{mcore}.self_attention", f"{hf}.linear_attn"
    conv = net.blocks[:3]
    return [
        same(f"{mcore}.conv1d.weight", f"{hf}.conv1d.weight", sum(conv), 1, kernel, split=Split(0, conv)),
        same(f"{mcore}.A_log", f"{hf}.A_log", net.value_heads, split=Split(0)),
        same(f"{mcore}.dt_bias", f"{hf}.dt_bias", net.value_heads, split=Split(0)),
        same(f"{mcore}.out_norm.weight", f"{hf}.norm.weight", net.value_dim),
        same(f"{mcore}.out_proj.weight", f"{hf}.out_proj.weight", config["hidden_size"], net.values, split=Split(1)),
    ]


def gated_attention(config: Config, mcore: str, hf: str) -> list[Link]:
    """Links of grouped-query attention with normalised heads, whose query projection includes a gate per head."""
    D, groups = head_dim(config), config["num_key_value_heads"]
    plain = blocks.attention(config, mcore, hf, qk_norm=True)
    (q, H), *kv_shapes = plain[0].shapes
    fused = dataclasses.replace(plain[0], shapes=((2 * q, H), *kv_shapes), join=GatedGroupedRows(groups, D))
    return [fused, *plain[1:]]
