"""Trainer and engine compute what transformers computes, for a fixed sample of the architectures of docs/models.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from causal_models import model_types
from family_table import compare, table_types

SAMPLE = [
    "bloom", "cohere2", "deepseek_v3", "doge", "ernie4_5_moe", "falcon_h1", "gemma2", "gemma3_text", "gemma3n_text",
    "gemma4_text", "glm_moe_dsa", "gpt2", "gpt_oss", "granitemoehybrid", "hunyuan_v1_moe", "lfm2", "mamba2", "minimax",
    "mistral", "mixtral", "nemotron_h", "olmo3", "phi3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "smollm3",
    "xlstm",
]  # fmt: skip
"""Each way to mix tokens, to scale logits, and to store weights at least once."""


@pytest.mark.parametrize("model_type", SAMPLE)
def test_trainer_and_engine_equal_transformers(model_type: str, tmp_path: Path):
    result = compare(model_type, tmp_path)
    assert result.passes, result


def test_the_table_has_every_architecture_of_transformers():
    assert table_types() == model_types()
