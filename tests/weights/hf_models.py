"""Tiny Hugging Face models of every family: configurations, and random weights as save_pretrained writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from slimectl.weights.complete import STAND_INS, completed

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3 tied": {"model_type": "qwen3", "tie_word_embeddings": True},
}


def config_of(name: str) -> dict[str, Any]:
    return completed({**SMALL, **CONFIGS[name]})


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
