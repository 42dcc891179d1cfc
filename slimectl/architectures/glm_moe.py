"""GLM-4.5 (glm4_moe) and GLM-5 (glm_moe_dsa): mixtures of experts."""

from __future__ import annotations

import dataclasses

from slimectl.architectures import blocks, deepseek
from slimectl.architectures.blocks import same
from slimectl.architectures.config import Architecture, Config, dense, require
from slimectl.architectures.deepseek import mixture, shared_fields, sparse_layers
from slimectl.architectures.family import Family
from slimectl.architectures.mapping import ParamMapping


def glm4_moe_architecture(config: Config) -> Architecture:
    require(config)
    ffn = config["moe_intermediate_size"]
    return dense(
        config,
        add_qkv_bias=config["attention_bias"],
        qk_layernorm=config["use_qk_norm"],
        **blocks.fields(config, experts=config["n_routed_experts"], ffn=ffn, sparse=sparse_layers(config)),
        **blocks.sigmoid_routing(config),
        **shared_fields(config),
    )


def glm4_moe_links(config: Config) -> list[ParamMapping]:
    sparse = sparse_layers(config)

    def layer(i: int, mcore: str, hf: str) -> list[ParamMapping]:
        plain = blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"])
        return [
            *blocks.attention(config, mcore, hf, bias=config["attention_bias"], qk_norm=config["use_qk_norm"]),
            *(mixture(config, mcore, hf) if sparse[i] else plain),
            *blocks.norms(config, mcore, hf),
        ]

    return blocks.layered(config, layer)


GLM4_MOE = Family("glm4_moe", ("glm4_moe",), glm4_moe_architecture, glm4_moe_links, spare_layers=True)


def glm_moe_dsa_architecture(config: Config) -> Architecture:
    plain = deepseek.architecture(config)
    indexer = {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": config["index_n_heads"],
        "dsa_indexer_head_dim": config["index_head_dim"],
        "dsa_indexer_topk": config["index_topk"],
    }
    return dataclasses.replace(plain, layer="sparse_latent", transformer={**plain.transformer, **indexer})


def indexer(config: Config, i: int) -> list[ParamMapping]:
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


def glm_moe_dsa_links(config: Config) -> list[ParamMapping]:
    embedding, *final = deepseek.links(config)
    return [embedding, *(link for i in range(config["num_hidden_layers"]) for link in indexer(config, i)), *final]


GLM_MOE_DSA = Family("glm_moe_dsa", ("glm_moe_dsa",), glm_moe_dsa_architecture, glm_moe_dsa_links, spare_layers=True)
