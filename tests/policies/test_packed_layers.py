"""Layers with windows, sinks and soft caps in packs: what each row computes alone, by transformers' own code."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import WeightedNegativeLogProb, new_policy
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slimectl.policies import causal_attention
from slimectl.policies.recompute import Recompute
from slimectl.types import TrainingSample

SHAPE = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "sliding_window": 5,
}  # fmt: skip
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
USED = {"use_sliding_window": True}
WINDOWS: dict[str, dict[str, Any]] = {
    "gemma2": MIXED | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": None},
    "gemma3_text": MIXED,
    "gemma4_text": MIXED | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256, "global_head_dim": 16},
    "gpt_oss": MIXED,
    "mistral": {},
    "olmo3": MIXED,
    "phi3": {},
    "qwen2_moe": MIXED | USED,  # passes its window in the mask only
    "smollm3": MIXED | USED | {"no_rope_layers": [1, 0]},
}


@dataclass(frozen=True)
class Reference:
    folder: Path
    rows: list[TrainingSample]
    log_probs: list[list[float]]
    gradients: dict[str, Tensor]


def rows_of_two_prompts() -> list[TrainingSample]:
    """Six rows of 14 to 44 tokens; three share a prompt of 13 tokens, and two of these the start of their answer."""
    draw = random.Random(3)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 256) for _ in range(count)]

    prompt, start = tokens(13), tokens(4)
    answers = [start + tokens(6), start + tokens(17), tokens(1)]
    rows = [TrainingSample(prompt + answer, len(answer), [0.02] * len(answer)) for answer in answers]
    return rows + [
        TrainingSample(tokens(9) + tokens(count), count, [0.02] * count, group=i + 1)
        for i, count in enumerate((35, 8, 20))
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], Reference]:
    """Write a model with random weights and compute each row alone, with transformers' eager attention."""

    def compute(model_type: str, config: dict[str, Any]) -> Reference:
        torch.manual_seed(0)
        folder, eager = tmp_path_factory.mktemp(model_type), {"dtype": torch.float32, "attn_implementation": "eager"}
        hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SHAPE | config)), **eager)
        for name, parameter in hf.named_parameters():
            if parameter.ndim > 1 or "sinks" in name:
                torch.nn.init.normal_(parameter, std=1.0 if "sinks" in name else 0.2)
        hf.save_pretrained(folder)
        rows, log_probs = rows_of_two_prompts(), []
        hf = AutoModelForCausalLM.from_pretrained(folder, **eager).eval()
        for row in rows:
            tokens_1T = torch.tensor([row.tokens])
            log_p_TV = hf(tokens_1T[:, :-1], use_cache=False).logits[0].log_softmax(-1)
            log_probs.append(log_p_TV.gather(1, tokens_1T[0, 1:, None])[-row.response_length :, 0])
        (-0.02 * torch.cat(log_probs).sum()).backward()
        gradients = {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}
        return Reference(folder, rows, [part.tolist() for part in log_probs], gradients)

    return compute


def assert_equal(reference: Reference, **options: Any) -> None:
    """Log-probabilities and gradients of a policy are those of the reference."""
    policy = new_policy(reference.folder, **options)
    for found, expected in zip(policy.log_probs(reference.rows), reference.log_probs, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    policy.forward_backward(reference.rows, WeightedNegativeLogProb())
    found = {name: p.grad for name, p in policy.masters.parameters.items() if p.grad is not None}
    assert reference.gradients.keys() == found.keys()
    largest = max(grad.norm().item() for grad in reference.gradients.values())
    for name, grad in reference.gradients.items():
        assert (found[name] - grad).norm().item() <= 1e-5 * (grad.norm().item() + 0.01 * largest), name


@pytest.mark.parametrize("model_type", WINDOWS)
def test_windows_sinks_and_caps_of_packed_rows(
    reference: Callable[..., Reference], model_type: str, monkeypatch: pytest.MonkeyPatch
):
    expected = reference(model_type, WINDOWS[model_type])
    assert_equal(expected)
    assert_equal(expected, share_prefixes=False, recompute=Recompute("selective"))
    causal_attention._mask_matrix.cache_clear()
    monkeypatch.setattr(causal_attention, "CHUNK", 7)
    assert_equal(expected, recompute=Recompute("full"))
    causal_attention._mask_matrix.cache_clear()
