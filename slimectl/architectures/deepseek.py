"""Latent attention (DeepSeek-V3, arXiv:2412.19437), and its variant with an indexer (GLM-5)."""

from __future__ import annotations

from typing import Any

from slimectl.architectures.blocks import same
from slimectl.architectures.config import Config, rope
from slimectl.architectures.family import Attention
from slimectl.architectures.mapping import ParamMapping, TensorParallelSplit
from slimectl.errors import CheckpointError

LATENT_EPSILON = 1e-6
"""Epsilon of the norms of both latents. The published model code uses this default instead of rms_norm_eps."""


def sparse_layers(config: Config) -> list[bool]:
    """Return for every layer whether it has experts. All but the first few do. Newer configurations list them."""
    kinds = config.get("mlp_layer_types")
    if kinds:
        return [kind == "sparse" for kind in kinds]
    return [i >= (config.get("first_k_dense_replace") or 0) for i in range(config["num_hidden_layers"])]


def latent_fields(config: Config) -> dict[str, Any]:
    return {
        "num_query_groups": config["num_attention_heads"],
        "kv_channels": config["qk_nope_head_dim"],
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        **_rope_fields(config),
    }


def _rope_fields(config: Config) -> dict[str, object]:
    """Return the rotary fields of MLATransformerConfig. Raises CheckpointError for an unsupported type."""
    rotary = rope(config)
    scaling = rotary.scaling
    if scaling is None:
        # mcore uses scaling factors for its softmax scale even without YaRN. 1 means no scaling.
        return {"rope_type": "rope", "rotary_base": rotary.theta, "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    if scaling["rope_type"] != "yarn":
        raise CheckpointError(f"config.json: rope_type {scaling['rope_type']!r}: latent attention supports only 'yarn'")
    return {
        "rope_type": "yarn",
        "rotary_base": rotary.theta,
        "rotary_scaling_factor": float(scaling["factor"]),
        "original_max_position_embeddings": int(scaling["original_max_position_embeddings"]),
        "beta_fast": float(scaling.get("beta_fast") or 32),
        "beta_slow": float(scaling.get("beta_slow") or 1),
        "mscale": float(scaling.get("mscale") or 1.0),
        "mscale_all_dim": float(scaling.get("mscale_all_dim") or 0.0),
    }


def latent_links(config: Config, i: int, mcore: str, hf: str) -> list[ParamMapping]:
    """Return the links of latent attention. Down-projections are replicated, up-projections split by heads."""
    H, heads, q_rank, kv_rank = (
        config[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rotary, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    mcore, hf = f"{mcore}.self_attention", f"{hf}.self_attn"
    query = heads * (nope + rotary)
    if q_rank:
        links = [
            same(f"{mcore}.linear_q_down_proj.weight", f"{hf}.q_a_proj.weight", q_rank, H),
            same(f"{mcore}.q_layernorm.weight", f"{hf}.q_a_layernorm.weight", q_rank),
            same(
                f"{mcore}.linear_q_up_proj.weight", f"{hf}.q_b_proj.weight", query, q_rank, split=TensorParallelSplit(0)
            ),
        ]
    else:
        links = [same(f"{mcore}.linear_q_proj.weight", f"{hf}.q_proj.weight", query, H, split=TensorParallelSplit(0))]
    up = heads * (nope + value)
    return [
        *links,
        same(f"{mcore}.linear_kv_down_proj.weight", f"{hf}.kv_a_proj_with_mqa.weight", kv_rank + rotary, H),
        same(f"{mcore}.kv_layernorm.weight", f"{hf}.kv_a_layernorm.weight", kv_rank),
        same(f"{mcore}.linear_kv_up_proj.weight", f"{hf}.kv_b_proj.weight", up, kv_rank, split=TensorParallelSplit(0)),
        same(f"{mcore}.linear_proj.weight", f"{hf}.o_proj.weight", H, heads * value, split=TensorParallelSplit(1)),
    ]


def indexer_fields(config: Config) -> dict[str, Any]:
    return {
        **latent_fields(config),
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": config["index_n_heads"],
        "dsa_indexer_head_dim": config["index_head_dim"],
        "dsa_indexer_topk": config["index_topk"],
    }


def indexer_links(config: Config, i: int, mcore: str, hf: str) -> list[ParamMapping]:
    """Return the links of a layer with its indexer. A "shared" layer uses the selection of the previous layer."""
    latent = latent_links(config, i, mcore, hf)
    if config["indexer_types"][i] == "shared":
        return latent
    mcore, hf = f"{mcore}.self_attention.core_attention.indexer", f"{hf}.self_attn.indexer"
    heads, width = config["index_n_heads"], config["index_head_dim"]
    return [
        *latent,
        same(f"{mcore}.linear_wq_b.weight", f"{hf}.wq_b.weight", heads * width, config["q_lora_rank"]),
        same(f"{mcore}.linear_wk.weight", f"{hf}.wk.weight", width, config["hidden_size"]),
        same(f"{mcore}.k_norm.weight", f"{hf}.k_norm.weight", width),
        same(f"{mcore}.k_norm.bias", f"{hf}.k_norm.bias", width),
        same(f"{mcore}.linear_weights_proj.weight", f"{hf}.weights_proj.weight", heads, config["hidden_size"]),
    ]


_EXTRA = {"latent_norm_epsilon": LATENT_EPSILON}
LATENT = Attention("latent attention", latent_links, latent_fields, latent=True, extra=_EXTRA)
SPARSE_LATENT = Attention("an indexer", indexer_links, indexer_fields, "sparse_latent", latent=True, extra=_EXTRA)
