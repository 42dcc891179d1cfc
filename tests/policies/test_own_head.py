"""Logits that a model scales, caps or shifts: the packed trainer computes them with the model's own head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import (
    SHAPE,
    WeightedNegativeLogProb,
    flat_log_probs,
    new_policy,
    plain_loop,
    random_rows,
    write_random_model,
)

from slimectl.policies import lm_head
from slimectl.policies.fsdp.build import empty_model

HEADS: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 3.0, "tie_word_embeddings": True},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "phi": {"tie_word_embeddings": False},  # a bias
}
NewModel = Callable[..., Path]


@pytest.fixture
def new_model(tmp_path: Path) -> NewModel:
    return partial(write_random_model, tmp_path)


@pytest.mark.parametrize("model_type", HEADS)
def test_logits_that_are_more_than_a_product_are_the_models_own(
    new_model: NewModel, model_type: str, monkeypatch: pytest.MonkeyPatch
):
    folder, rows = new_model(model_type, **SHAPE | HEADS[model_type]), random_rows(groups=2)
    expected_R, gradients = plain_loop(folder, rows, temperature=0.7, attn_implementation="eager")
    monkeypatch.setattr(lm_head, "CHUNK_LOGITS", 256 * 5)  # five states a chunk, one of which is kept
    monkeypatch.setattr(lm_head, "KEPT_LOGITS", 256 * 5)
    policy = new_policy(folder, temperature=0.7)
    assert not policy.model.causal.is_plain
    torch.testing.assert_close(flat_log_probs(policy, rows), expected_R, rtol=0, atol=1e-5)
    policy.forward_backward(rows, WeightedNegativeLogProb())
    for name, parameter in policy.masters.parameters.items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "olmo2"])
def test_a_head_that_is_one_product_is_computed_as_such(new_model: NewModel, model_type: str):
    assert empty_model(new_model(model_type, **SHAPE)).causal.is_plain
