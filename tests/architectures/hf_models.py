"""Tiny Hugging Face models of every family: configurations, and random weights as save_pretrained writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slimectl.architectures.config import with_defaults
from slimectl.architectures.config_defaults import STAND_INS

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip

MLA = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip

DELTA = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 10, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3 tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **MLA,
        "q_lora_rank": 20,
        "n_group": 2,
        "topk_group": 1,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "moonlight": {
        "model_type": "deepseek_v3",
        **MLA,
        "q_lora_rank": None,
        "routed_scaling_factor": 2.446,
        "n_shared_experts": 2,
        "rms_norm_eps": 1e-5,
    },
    "kimi_k2": {"model_type": "kimi_k2", **MLA, "q_lora_rank": 20, "num_nextn_predict_layers": 1},
    "glm4": {"model_type": "glm4"},
    "glm4 without biases": {"model_type": "glm4", "attention_bias": False},
    "glm4_moe": {"model_type": "glm4_moe", **MLA, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
    "glm4_moe with norms": {
        "model_type": "glm4_moe",
        **MLA,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 1,
    },
    "mimo": {"model_type": "mimo"},
    "minimax_m2": {
        "model_type": "minimax_m2",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
    },
    "qwen3_next": {"model_type": "qwen3_next", **DELTA, "mlp_only_layers": [1]},
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA, "tie_word_embeddings": True},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **DELTA},
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        **MLA,
        "q_lora_rank": 20,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "num_hidden_layers": 3,
        "indexer_types": ["full", "full", "shared"],
    },
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **MLA, "q_lora_rank": 20},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "gemma3": {"model_type": "gemma3_text", "tie_word_embeddings": True},
}


VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    return with_defaults({**SMALL, **CONFIGS[name]})


def saved(name: str, folder: Path) -> Path:
    """A checkpoint of random weights (norms and biases too), written by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = {**SMALL, **CONFIGS[name]}
    config = AutoConfig.for_model(**{**raw, "model_type": STAND_INS.get(raw["model_type"], raw["model_type"])})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder
