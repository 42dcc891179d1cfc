"""deepseek_v3 (DeepSeek-V3, V3.1, R1, Kimi K2, Moonlight, GLM-4.7-Flash): latent attention, many small experts."""

from __future__ import annotations

import dataclasses

from slimectl.architectures import blocks
from slimectl.architectures.blocks import same
from slimectl.architectures.config import Architecture, Config, Family, dense, require, rope
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


def architecture(config: Config) -> Architecture:
    require(config, attention_bias=False)
    ffn = config["moe_intermediate_size"]
    plain = dense(
        config,
        num_query_groups=config["num_attention_heads"],
        kv_channels=config["qk_nope_head_dim"],
        qk_layernorm=True,
        q_lora_rank=config["q_lora_rank"],
        kv_lora_rank=config["kv_lora_rank"],
        qk_head_dim=config["qk_nope_head_dim"],
        qk_pos_emb_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        **blocks.fields(config, experts=config["n_routed_experts"], ffn=ffn, sparse=sparse_layers(config)),
        **blocks.sigmoid_routing(config),
        **shared_fields(config),
    )
    return dataclasses.replace(
        plain,
        mla=True,
        rope=rope(config, interleaved=bool(config.get("rope_interleave", True))),
        transformer={**plain.transformer, **_rope_fields(config)},
        extra={"latent_norm_epsilon": LATENT_EPSILON},
    )


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


def shared_ffn(config: Config) -> int:
    """Return the total width of all shared experts."""
    return int(config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0))


def shared_fields(config: Config) -> dict[str, int]:
    """Return mcore's fields for the shared experts. Empty if there are none."""
    ffn = shared_ffn(config)
    return {"moe_shared_expert_intermediate_size": ffn} if ffn else {}


def latent_attention(config: Config, mcore: str, hf: str) -> list[ParamMapping]:
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


def mixture(config: Config, mcore: str, hf: str) -> list[ParamMapping]:
    """Return the links of a layer's router with bias, routed experts and shared experts."""
    return [
        *blocks.routed(
            config, mcore, f"{hf}.mlp", experts=config["n_routed_experts"], ffn=config["moe_intermediate_size"],
            bias="gate.e_score_correction_bias",
        ),
        *(blocks.shared(config, mcore, f"{hf}.mlp.shared_experts", shared_ffn(config)) if shared_ffn(config) else ()),
    ]  # fmt: skip


def links(config: Config) -> list[ParamMapping]:
    sparse = sparse_layers(config)

    def layer(i: int, mcore: str, hf: str) -> list[ParamMapping]:
        plain = blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", config["hidden_size"], config["intermediate_size"])
        return [
            *latent_attention(config, mcore, hf),
            *(mixture(config, mcore, hf) if sparse[i] else plain),
            *blocks.norms(config, mcore, hf),
        ]

    return blocks.layered(config, layer)


FAMILY = Family(
    "deepseek_v3",
    ("deepseek_v3", "kimi_k2"),
    architecture,
    links,
    carried=(r"rotary_emb\.inv_freq$",),
    spare_layers=True,
)
GLM = dataclasses.replace(FAMILY, name="glm4_moe_lite", model_types=("glm4_moe_lite",))
"""GLM-4.7-Flash: the same layers under another name."""
