"""qwen3_next: Qwen3-Next; three layers of gated delta nets to one of gated attention, experts in all."""

from __future__ import annotations

from slimectl.weights import blocks, delta, moe
from slimectl.weights.architecture import Architecture, Config
from slimectl.weights.family import Family
from slimectl.weights.joins import Ungrouped
from slimectl.weights.links import Link
from slimectl.weights.qwen2_moe import experts, mixture, shared_fields, sparse_layers


def architecture(config: Config) -> Architecture:
    return delta.architecture(
        config,
        **moe.fields(
            config, experts=experts(config), ffn=config["moe_intermediate_size"], sparse=sparse_layers(config)
        ),
        **moe.softmax_routing(normalized=config["norm_topk_prob"]),
        **shared_fields(config),
    )


def projection(config: Config, mcore: str, hf: str) -> Link:
    """Link of the input projection from [q | k | v | z] and [b | a] of each key head."""
    net = delta.sizes(config)
    share = net.value_heads // net.key_heads
    values = share * net.value_dim
    bands = ((net.key_dim, net.key_dim, values, values), (share, share))
    names = (f"{hf}.linear_attn.in_proj_qkvz.weight", f"{hf}.linear_attn.in_proj_ba.weight")
    rows = tuple(net.key_heads * sum(band) for band in bands)
    return delta.projection(config, mcore, names, rows, Ungrouped(net.key_heads, bands))


def links(config: Config) -> list[Link]:
    sparse = sparse_layers(config)

    def mlp(i: int, mcore: str, hf: str) -> list[Link]:
        if sparse[i]:
            return mixture(config, mcore, hf)
        return blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"])

    return delta.links(config, lambda _, mcore, hf: [projection(config, mcore, hf)], mlp)


FAMILY = Family("qwen3_next", ("qwen3_next",), architecture, links, carried=(r"^mtp\.",))
