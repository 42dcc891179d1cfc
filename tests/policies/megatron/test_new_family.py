"""A family that differs from Llama by data takes one declaration: converter, trainers and engine run it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import WeightedNegativeLogProb, flat_log_probs, new_policy, padded_log_probs, random_rows
from rank_cases import megatron
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from slimectl.architectures.family import Family
from slimectl.architectures.registry import FAMILIES, GLM4, family_of
from slimectl.checkpoints.create import create_model
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.errors import CheckpointError
from slimectl.types import SamplingParams, TrainingSample

NEW = Family("new_family", qkv_bias="attention_bias", qk_norm=True)
"""The declaration: biases of query, key and value, which are also normalized head by head."""
CONFIG: dict[str, Any] = {
    "model_type": "new_family", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "attention_bias": True,
    "tie_word_embeddings": False,
}  # fmt: skip


class NewConfig(Qwen3Config):
    model_type = "new_family"


class NewModel(Qwen3ForCausalLM):
    config_class = NewConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.o_proj = torch.nn.Linear(64, 32, bias=False)


AutoConfig.register("new_family", NewConfig)
AutoModelForCausalLM.register(NewConfig, NewModel)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose norms and biases are random too: ones and zeros would hide mistakes."""
    monkeypatch.setitem(FAMILIES, NEW.name, NEW)
    create_model(CONFIG, tmp_path, seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(tmp_path)
    return tmp_path


def generated(folder: Path, weights: Any) -> TrainingSample:
    """Return an answer of the embedded engine, with the log-probabilities that it sampled at."""
    engine = EmbeddedEngine(AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    engine.load_weights(weights, version="0")
    prompt = list(b"three new families")
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    answer = asyncio.run(engine.generate(prompt, params=params))
    return TrainingSample([*prompt, *answer.tokens], 12, [0.1] * 12, old_log_probs=answer.log_probs)


def test_a_declaration_trains_and_generates(folder: Path):
    """Transformers, both trainers and the engine agree on log-probabilities, before and after a step."""
    rows = random_rows()
    expected = torch.cat(padded_log_probs(AutoModelForCausalLM.from_pretrained(folder), rows)).detach()
    policies = [new_policy(folder), megatron(folder)]
    for policy in policies:
        assert (flat_log_probs(policy, rows) - expected).abs().max() < 1e-5
    sample = generated(folder, HFCheckpoint().read(folder))
    for policy in policies:
        assert policy.log_probs([sample])[0] == pytest.approx(sample.old_log_probs, abs=1e-5)
    for policy in policies:
        policy.forward_backward(rows, WeightedNegativeLogProb())
        policy.optim_step()
        later = generated(folder, policy.weights())
        assert policy.log_probs([later])[0] == pytest.approx(later.old_log_probs, abs=1e-5)
        assert policy.log_probs([sample])[0] != pytest.approx(sample.old_log_probs, abs=1e-3)


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"activation": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh in MLPs"),
        ({"activation": "relu"}, "relu in MLPs"),
        ({"scales_embedding": True}, "scaled embeddings"),
        ({"sinks": True}, "attention sinks"),
        ({"softmax_scale": lambda config: 0.5}, "another scale of attention scores"),
        ({"windows": lambda config: [4, None]}, "attention within windows"),
        ({"soft_caps": ("final_logit_softcapping",)}, "soft caps"),
        ({"norms": GLM4.norms}, "norms on the outputs of attention and MLP"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_declared_but_not_computed_is_refused_by_name(folder: Path, monkeypatch, declared: Any, reason: str):
    family = Family("new_family", **declared)
    monkeypatch.setitem(FAMILIES, "new_family", family)
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(CheckpointError, match=rf"embedded engine does not support .*{reason}"):
        EmbeddedEngine(config, AutoTokenizer.from_pretrained(folder))
    if family.untrained:
        with pytest.raises(CheckpointError, match=rf"cannot be trained by Megatron or converted \({reason}\)"):
            family_of(config.to_dict()).architecture(config.to_dict())
