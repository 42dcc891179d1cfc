"""Qwen3-Next and Qwen3.5: gated delta nets alternating with gated attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from slimectl.architectures import blocks
from slimectl.architectures.blocks import same
from slimectl.architectures.config import Config, head_dim
from slimectl.architectures.family import Attention
from slimectl.architectures.mapping import (
    ConcatRows,
    Deinterleave,
    InterleaveGatedGroups,
    Merge,
    ParamMapping,
    Shape,
    TensorParallelSplit,
)


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


def delta_fields(config: Config) -> dict[str, Any]:
    return {
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(is_linear(config, i)) for i in range(config["num_hidden_layers"])],
        "linear_conv_kernel_dim": config["linear_conv_kernel_dim"],
        "linear_key_head_dim": config["linear_key_head_dim"],
        "linear_value_head_dim": config["linear_value_head_dim"],
        "linear_num_key_heads": config["linear_num_key_heads"],
        "linear_num_value_heads": config["linear_num_value_heads"],
    }


def delta_attention(projection: Callable[[Config, str, str], ParamMapping]) -> Attention:
    """Return the attention of a family. `projection` gives the input projection, which families store differently."""

    def links(config: Config, i: int, mcore: str, hf: str) -> list[ParamMapping]:
        if is_linear(config, i):
            return [projection(config, mcore, hf), *delta_net(config, mcore, hf)]
        return gated_attention(config, mcore, hf)

    return Attention("linear attention", links, delta_fields, "gated_delta")


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


def qwen3_next_projection(config: Config, mcore: str, hf: str) -> ParamMapping:
    """Return the link of the input projection from [q | k | v | z] and [b | a] of each key head."""
    net = sizes(config)
    share = net.value_heads // net.key_heads
    values = share * net.value_dim
    bands = ((net.key_dim, net.key_dim, values, values), (share, share))
    names = (f"{hf}.linear_attn.in_proj_qkvz.weight", f"{hf}.linear_attn.in_proj_ba.weight")
    rows = tuple(net.key_heads * sum(band) for band in bands)
    return delta_projection(config, mcore, names, rows, Deinterleave(net.key_heads, bands))


def qwen3_5_projection(config: Config, mcore: str, hf: str) -> ParamMapping:
    """Return the link of the input projection from [q | k | v], z, b and a."""
    net = sizes(config)
    names = tuple(f"{hf}.linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    rows = (sum(net.blocks[:3]), *net.blocks[3:])
    return delta_projection(config, mcore, names, rows, ConcatRows())


GATED_DELTA_OF_NEXT = delta_attention(qwen3_next_projection)
GATED_DELTA = delta_attention(qwen3_5_projection)
