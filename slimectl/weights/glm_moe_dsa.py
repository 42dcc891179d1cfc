"""glm_moe_dsa: GLM-5; deepseek_v3's layers with an indexer that selects the tokens to attend to."""

from __future__ import annotations

import dataclasses

from slimectl.weights import deepseek_v3
from slimectl.weights.architecture import Architecture, Config
from slimectl.weights.blocks import same
from slimectl.weights.family import Family
from slimectl.weights.links import Link


def architecture(config: Config) -> Architecture:
    plain = deepseek_v3.architecture(config)
    indexer = {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": config["index_n_heads"],
        "dsa_indexer_head_dim": config["index_head_dim"],
        "dsa_indexer_topk": config["index_topk"],
    }
    return dataclasses.replace(plain, layer="sparse_latent", transformer={**plain.transformer, **indexer})


def indexer(config: Config, i: int) -> list[Link]:
    """Links of a layer's indexer; a "shared" layer uses the selection of the layer before it."""
    if config["indexer_types"][i] == "shared":
        return []
    mcore, hf = f"decoder.layers.{i}.self_attention.core_attention.indexer", f"model.layers.{i}.self_attn.indexer"
    heads, width = config["index_n_heads"], config["index_head_dim"]
    return [
        same(f"{mcore}.linear_wq_b.weight", f"{hf}.wq_b.weight", heads * width, config["q_lora_rank"]),
        same(f"{mcore}.linear_wk.weight", f"{hf}.wk.weight", width, config["hidden_size"]),
        same(f"{mcore}.k_norm.weight", f"{hf}.k_norm.weight", width),
        same(f"{mcore}.k_norm.bias", f"{hf}.k_norm.bias", width),
        same(f"{mcore}.linear_weights_proj.weight", f"{hf}.weights_proj.weight", heads, config["hidden_size"]),
    ]


def links(config: Config) -> list[Link]:
    embedding, *final = deepseek_v3.links(config)
    return [embedding, *(link for i in range(config["num_hidden_layers"]) for link in indexer(config, i)), *final]


FAMILY = Family("glm_moe_dsa", ("glm_moe_dsa",), architecture, links, spare_layers=True)
