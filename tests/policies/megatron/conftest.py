"""Models of four layers, so that pipelines of several stages can be made of them, and ranks to cut them for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_cases import Ranks

from slimectl.checkpoints.create import create_model

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3", "tie_word_embeddings": False},
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "experts": {
        "model_type": "qwen3_moe", "tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
    "latent": {
        "model_type": "deepseek_v3", "tie_word_embeddings": False, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "num_key_value_heads": 4, "head_dim": 8,
    },
    "delta": {
        "model_type": "qwen3_5_text", "tie_word_embeddings": False,
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    "windows": {
        "model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "sinks": {
        "model_type": "gpt_oss", "tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 32, "sliding_window": 5,
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`four_layers("tied")` is the folder of a random model; its 259 tokens do not divide by two."""
    made: dict[str, Path] = {}

    def make(kind: str = "dense") -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            create_model(SHAPE | MODELS[kind], made[kind], seed=7)
        return made[kind]

    return make


RANKS: dict[int, Ranks] = {}
"""By their number; their processes live until the last test of this folder."""


@pytest.fixture(scope="session")
def two() -> Ranks:
    RANKS[2] = Ranks(2)
    return RANKS[2]


@pytest.fixture(scope="session")
def four() -> Ranks:
    RANKS[4] = Ranks(4)
    return RANKS[4]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks with the folder: their threads poll, and no scope of pytest's ends with a folder of no package."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        while RANKS:
            RANKS.popitem()[1].close()
