"""Trainer and engine compute what transformers computes, for a fixed sample of the architectures of docs/models.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from causal_models import model_types, write_model
from family_table import TOLERANCE, compare, table_types

from slimectl.checkpoints.create import byte_tokenizer

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


@pytest.mark.parametrize("model_type", ["nemotron_h", "zamba2"])
def test_state_space_models_do_not_read_later_chunks(model_type: str, tmp_path: Path):
    """transformers' torch code does, so the reference computes rows as one chunk."""
    whole, chunked = tmp_path / "whole", tmp_path / "chunked"
    write_model(model_type, whole)
    byte_tokenizer().save_pretrained(whole)
    config = json.loads((whole / "config.json").read_text())
    assert config["chunk_size"] == 64
    shutil.copytree(whole, chunked)
    (chunked / "config.json").write_text(json.dumps(config | {"chunk_size": 8}))
    result = compare(model_type, chunked, reference_folder=whole)
    assert [result.log_probs, result.sampled, result.step] == pytest.approx([0, 0, 0], abs=TOLERANCE)


def test_the_table_has_every_architecture_of_transformers():
    assert table_types() == model_types()
