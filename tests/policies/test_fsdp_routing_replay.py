"""The trainer of Hugging Face models routes tokens to the experts that the engine chose (arXiv:2510.11370)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import Clipped, flat_log_probs, new_policy, random_rows
from policies.routing_cases import computed_once, routed
from policies.trie_cases import assert_same_step, calm_model, counted_tokens, forked_rows, unique_tokens
from torch import Tensor
from transformers import AutoModelForCausalLM

from slimectl.algorithms import packing
from slimectl.data.routed_experts import decoded, encoded
from slimectl.errors import RecordError, SettingsError
from slimectl.policies.recompute import Recompute
from slimectl.types import TrainingSample

ModelDir = Callable[..., Path]
SIZES = {"qwen3_moe": 5, "qwen2_moe": 4, "glm4_moe": 4}
"""Experts of each family; all have two layers, and two experts of a token."""


def softmax_routing(block: Any, hidden_NH: Tensor, experts_Nk: Tensor) -> Tensor:
    """Weights of chosen experts: their softmax over all experts, normalized if the family does that."""
    probs_NE = torch.softmax(hidden_NH @ block.gate.weight.T, -1)
    weights_Nk = probs_NE.gather(1, experts_Nk)
    return weights_Nk / weights_Nk.sum(-1, keepdim=True) if block.gate.norm_topk_prob else weights_Nk


def sigmoid_routing(block: Any, hidden_NH: Tensor, experts_Nk: Tensor) -> Tensor:
    """The same of GLM 4.5 and DeepSeek: sigmoids, normalized and scaled, without the biases of the choice."""
    weights_Nk = torch.sigmoid(hidden_NH @ block.gate.weight.T).gather(1, experts_Nk)
    router = block if hasattr(block, "norm_topk_prob") else block.gate  # block until transformers 5.18 or so
    weights_Nk = weights_Nk / weights_Nk.sum(-1, keepdim=True) if router.norm_topk_prob else weights_Nk
    return weights_Nk * router.routed_scaling_factor


def expected_log_probs(folder: Path, row: TrainingSample) -> Tensor:
    """Log-probabilities of a row alone, in a model whose experts module is called with the row's experts."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert row.routed_experts is not None
    experts_ILk = torch.from_numpy(decoded(row.routed_experts).astype("int64"))
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            routing = sigmoid_routing if hasattr(layer.mlp.gate, "e_score_correction_bias") else softmax_routing
            call = layer.mlp.experts.forward

            def forced(
                hidden: Tensor, *_: Any, i: int = i, mlp: Any = layer.mlp, routing: Any = routing, call: Any = call
            ):
                return call(hidden, experts_ILk[:, i], routing(mlp, hidden, experts_ILk[:, i]))

            layer.mlp.experts.forward = forced
    with torch.no_grad():
        logits_TV = model(torch.tensor([row.tokens[: row.input_length]])).logits[0]
    response = torch.tensor(row.tokens[row.prompt_length :])
    return logits_TV.log_softmax(-1)[row.prompt_length - 1 :].gather(1, response[:, None])[:, 0]


@pytest.mark.parametrize("family", SIZES)
def test_the_forward_uses_the_recorded_experts_with_the_routers_weights(model_dir: ModelDir, family: str):
    rows = routed(random_rows(groups=2, answers=2), layers=2, experts=SIZES[family])
    replaying = flat_log_probs(new_policy(model_dir(family), rollout_routing_replay=True), rows)
    free = flat_log_probs(new_policy(model_dir(family)), rows)
    expected = [expected_log_probs(model_dir(family), row) for row in rows]
    torch.testing.assert_close(replaying, torch.cat(expected), atol=2e-5, rtol=0)
    assert (free - torch.cat(expected)).abs().max() > 0.05


def test_tokens_behind_the_recorded_ones_are_routed_by_the_router(model_dir: ModelDir):
    row, shorter = routed(random_rows(groups=1, answers=2), layers=2, experts=5)
    shorter.tokens, shorter.response_length = row.tokens, row.response_length
    assert row.routed_experts is not None
    shorter.routed_experts = encoded(decoded(row.routed_experts)[:-2])
    policy = new_policy(model_dir("qwen3_moe"), rollout_routing_replay=True)
    whole, most = policy.log_probs([row, shorter])
    assert most[:-2] == pytest.approx(whole[:-2], abs=1e-6)
    assert abs(most[-1] - whole[-1]) > 1e-4


OPTIONS: list[dict[str, Any]] = [
    {"max_tokens_per_pack": 25},
    {"recompute": Recompute("full")},
    {"recompute": Recompute("selective", ("moe",)), "max_tokens_per_pack": 25},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradient_do_not_depend_on_packing_and_recomputation(model_dir: ModelDir, options: dict[str, Any]):
    rows = routed(random_rows(), layers=2, experts=4)
    whole = new_policy(model_dir("glm4_moe"), rollout_routing_replay=True, max_tokens_per_pack=500)
    other = new_policy(model_dir("glm4_moe"), rollout_routing_replay=True, **options)
    assert other.forward_backward(rows, Clipped()) == pytest.approx(whole.forward_backward(rows, Clipped()), rel=1e-5)
    assert other.optim_step()["grad_norm"] == pytest.approx(whole.optim_step()["grad_norm"], rel=1e-5)


def test_rows_share_tokens_of_equal_experts_and_learn_what_each_would_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(packing, "LEAST_SAVING", 0)
    folder = calm_model(
        tmp_path, model_type="qwen3_moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16
    )
    rows = routed(forked_rows(1), layers=2, experts=5, by_prefix=True)
    shared, alone = (new_policy(folder, rollout_routing_replay=True, share_prefixes=share) for share in (True, False))
    with counted_tokens(shared.model.hf.get_input_embeddings()) as counts:
        shared.log_probs(rows)
    assert unique_tokens(rows) < sum(counts) == computed_once(rows) < sum(row.input_length for row in rows)

    def gradients(policy: Any) -> dict[str, Tensor]:
        return {name: p.grad for name, p in policy.masters.parameters.items() if p.grad is not None}

    assert_same_step(shared, alone, rows, Clipped(), gradients)


def test_rows_of_another_model_are_refused(model_dir: ModelDir):
    policy = new_policy(model_dir("qwen3_moe"), rollout_routing_replay=True)
    rows = random_rows(groups=1, answers=1)
    with pytest.raises(RecordError, match="no rollout_routed_experts"):
        policy.log_probs(rows)
    with pytest.raises(
        RecordError, match=r"shape \[\d+, 3, 2\], expected at most \[\d+, 2, 2\]\. It comes from another"
    ):
        policy.log_probs(routed(rows, layers=3, experts=5))
    with pytest.raises(RecordError, match=r"contains expert [5-9], but this model has 5"):
        policy.log_probs(routed(rows, layers=2, experts=10))
    with pytest.raises(SettingsError, match="this model has no experts"):
        new_policy(model_dir("qwen3"), rollout_routing_replay=True)
