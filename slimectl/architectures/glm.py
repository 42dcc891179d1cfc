"""GLM-4-0414 and GLM-Z1 (glm4), and the mixtures of experts GLM-4.5 (glm4_moe) and GLM-5 (glm_moe_dsa)."""

from __future__ import annotations

import dataclasses

from slimectl.architectures import blocks, deepseek
from slimectl.architectures.blocks import same
from slimectl.architectures.config import Architecture, Config, Family, dense, require, rope
from slimectl.architectures.deepseek import mixture, shared_fields, sparse_layers
from slimectl.architectures.mapping import ParamMapping, TensorParallelSplit


def glm4_architecture(config: Config) -> Architecture:
    require(config)
    plain = dense(config, add_qkv_bias=config["attention_bias"], rotary_interleaved=True)
    return dataclasses.replace(plain, layer="sandwich", rope=rope(config, interleaved=True))


def glm4_links(config: Config) -> list[ParamMapping]:
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


GLM4 = Family("glm4", ("glm4",), glm4_architecture, glm4_links)


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
    """Return the links of a layer's indexer. A "shared" layer has none and uses the selection of the previous layer."""
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
