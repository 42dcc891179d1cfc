"""Configurations of the small random models of the tests, one for each family."""

from __future__ import annotations

from typing import Any

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
# A gated delta net, then gated attention.
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "head_dim": 32,
    "initializer_range": 0.1,
}
SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_wide": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 32},
    "llama_untied": {"model_type": "llama", "tie_word_embeddings": False, "num_key_value_heads": 4},
    "llama3_rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
    # A dense layer, then one of experts, in a number that two ranks do not share evenly.
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "qwen2_moe": {"model_type": "qwen2_moe", **SHARED_EXPERT},
    "qwen3_next": {"model_type": "qwen3_next", **DELTA, **SHARED_EXPERT, "linear_value_head_dim": 24},
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **DELTA, **SHARED_EXPERT},
    "glm4_moe": {
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    },
}
