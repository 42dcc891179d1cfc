"""Layers with windows, sinks, soft caps or states in packs: what each row computes alone, by transformers' own code."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import WeightedNegativeLogProb, new_policy
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slimectl.executors.local import LocalExecutor
from slimectl.policies import causal_attention
from slimectl.policies.rank_group import DistributedPolicy
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
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
WINDOWS: dict[str, dict[str, Any]] = {
    "gemma2": MIXED | {"attn_logit_softcapping": 2.0},
    "cohere2": MIXED,
    "gemma3_text": MIXED,
    "gemma4_text": MIXED | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256, "global_head_dim": 16},
    "gpt_oss": MIXED,
    "mistral": {},
    "olmo3": MIXED,
    "phi3": {},
    "qwen2_moe": MIXED | USED,  # passes its window in the mask only
    "smollm3": MIXED | USED | {"no_rope_layers": [1, 0]},
}

STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "olmo_hybrid": LINEAR,
    "minimax": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 1, "mamba_chunk_size": 64, "n_routed_experts": 4,
    },
}  # fmt: skip


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
                torch.nn.init.normal_(parameter, std=1.0 if "sinks" in name else 0.1)
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
    assert_equal(expected, share_prefixes=False, recompute=Recompute("selective"))
    causal_attention._mask_matrix.cache_clear()
    monkeypatch.setattr(causal_attention, "CHUNK", 7)
    assert_equal(expected, recompute=Recompute("full"))
    causal_attention._mask_matrix.cache_clear()


@pytest.mark.parametrize("model_type", STATES)
def test_states_and_convolutions_of_packed_rows(reference: Callable[..., Reference], model_type: str):
    expected = reference(model_type, STATES[model_type])
    assert_equal(expected, share_prefixes=False, recompute=Recompute("full"))
    assert_equal(expected, recompute=Recompute("selective"))


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2"])
def test_no_state_passes_from_a_row_to_another(reference: Callable[..., Reference], model_type: str):
    expected = reference(model_type, STATES[model_type])
    rows, policy = expected.rows[2:], new_policy(expected.folder)
    together = policy.log_probs(rows)
    assert policy.log_probs(rows[::-1]) == [pytest.approx(values, abs=1e-6) for values in together[::-1]]
    assert [policy.log_probs([row])[0] for row in rows] == [pytest.approx(values, abs=1e-6) for values in together]


@pytest.mark.slow
def test_two_ranks_with_states_equal_one(reference: Callable[..., Reference]):
    expected = reference("qwen3_next", STATES["qwen3_next"])
    two = DistributedPolicy(LocalExecutor(), partial(new_policy, expected.folder, max_tokens_per_pack=60), ranks=2)
    try:
        for found, values in zip(two.log_probs(expected.rows), expected.log_probs, strict=True):
            assert found == pytest.approx(values, abs=1e-5)
        one, loss = new_policy(expected.folder), WeightedNegativeLogProb()
        for policy in (one, two):
            policy.forward_backward(expected.rows, loss)
        assert two.optim_step() == pytest.approx(one.optim_step(), rel=1e-5)
    finally:
        two.close()
