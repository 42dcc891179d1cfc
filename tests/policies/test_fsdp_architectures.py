"""Architectures of transformers: dropout, frequencies that follow the length, the padding token, other layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import WeightedNegativeLogProb, new_policy, random_rows
from transformers import AutoConfig, AutoModelForCausalLM

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import RecordError, SettingsError
from slimectl.policies.fsdp.policy import FsdpCritic
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.recompute import Recompute
from slimectl.types import TrainingSample

SHAPE = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
FULL = Recompute("full")
NewModel = Callable[..., Path]


@pytest.fixture
def new_model(tmp_path: Path) -> NewModel:
    """Write a model of an architecture with random weights; returns its folder."""

    def make(model_type: str, **config: Any) -> Path:
        torch.manual_seed(0)
        hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config), dtype=torch.float32)
        for parameter in hf.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        hf.save_pretrained(tmp_path)
        return tmp_path

    return make


def one_by_one(folder: Path, rows: list[TrainingSample]) -> list[list[float]]:
    """Log-probabilities of transformers' model in evaluation mode, a row at a time."""
    found = []
    for row in rows:
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # afresh: frequencies are a state
        tokens_1T = torch.tensor([row.tokens])
        with torch.no_grad():
            log_p_TV = hf(tokens_1T[:, :-1]).logits[0].log_softmax(-1)  # as when the last token was sampled
        chosen_T = log_p_TV.gather(1, tokens_1T[0, 1:, None])[:, 0]
        found.append(chosen_T[-row.response_length :].tolist())
    return found


DROPOUT = {"residual_dropout": 0.3, "embedding_dropout": 0.3, "attention_dropout": 0.3, "hidden_dropout": 0.3}


@pytest.mark.parametrize("recompute", [Recompute(), Recompute("selective", ("core_attn", "mlp")), FULL], ids=str)
@pytest.mark.parametrize("model_type", ["starcoder2", "gpt_neox", "phi3"])
def test_no_recomputation_turns_dropout_on(new_model: NewModel, model_type: str, recompute: Recompute):
    folder = new_model(model_type, **SHAPE, **DROPOUT, resid_pdrop=0.3, embd_pdrop=0.3)
    rows = random_rows(groups=2)
    policy = new_policy(folder, recompute=recompute)
    for found, expected in zip(policy.log_probs(rows), one_by_one(folder, rows), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    gradient = new_policy(folder).forward_backward(rows, WeightedNegativeLogProb())
    assert policy.forward_backward(rows, WeightedNegativeLogProb()) == pytest.approx(gradient, rel=1e-6)


def test_layers_whose_mlp_has_another_name_recompute_their_attention(new_model: NewModel):
    folder, rows = new_model("lfm2", **SHAPE, layer_types=["full_attention"] * 2), random_rows(groups=1)
    policy = new_policy(folder, recompute=Recompute("selective", ("core_attn",)))
    for found, expected in zip(policy.log_probs(rows), one_by_one(folder, rows), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    with pytest.raises(SettingsError, match=r"recompute_modules: mlp is listed, but this model has no dense MLP"):
        new_policy(folder, recompute=Recompute("selective", ("mlp",)))


def test_a_critic_that_recomputes_has_the_same_values_every_time(new_model: NewModel):
    folder, rows = new_model("starcoder2", **SHAPE, **DROPOUT), random_rows(groups=1)
    plain, other = (
        FsdpCritic(folder, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=0.1), recompute=recompute))
        for recompute in (Recompute(), FULL)
    )
    for critic in (plain, other):
        critic.masters.tensors["score.weight"].fill_(0.5)
        critic.masters.copy_to_model()
    assert other.values(rows) == other.values(rows) == plain.values(rows)


ROPES = {
    "longrope": {
        "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 16, "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_that_follow_the_length_are_trained_up_to_where_they_change(new_model: NewModel, kind: str):
    shape = SHAPE | {"max_position_embeddings": 64 if kind == "longrope" else 16}
    folder = new_model("llama", **shape, rope_parameters=ROPES[kind])
    # A row of n tokens has n - 1 inputs: 17 tokens are the most.
    rows = [TrainingSample(list(range(first, first + 17)), 12, [1.0] * 12, group=first) for first in (1, 40, 90)]
    policy = new_policy(folder)
    for found, expected in zip(policy.log_probs(rows), one_by_one(folder, rows), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    rows.append(TrainingSample(list(range(18)), 12, [1.0] * 12, group=9, index=7))
    with pytest.raises(RecordError, match=rf"sample 7: 17 tokens, but the {kind} frequencies .* change beyond 16"):
        policy.log_probs(rows)


@pytest.mark.parametrize("tied", [True, False])
def test_the_token_that_pads_elsewhere_has_its_gradient(new_model: NewModel, tied: bool):
    folder = new_model("llama", **SHAPE | {"pad_token_id": 5, "tie_word_embeddings": tied})
    rows = [TrainingSample([5, 9, 5, 7, 5], 3, [1.0] * 3), TrainingSample([8, 5, 6], 2, [1.0] * 2, group=1)]
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embedding_VH = hf.get_input_embeddings().weight
    loss = torch.zeros(())
    for row in rows:
        tokens_T = torch.tensor(row.tokens)
        log_p_TV = hf(inputs_embeds=embedding_VH[tokens_T][None]).logits[0].log_softmax(-1)
        loss = loss - log_p_TV[:-1].gather(1, tokens_T[1:, None])[-row.response_length :].sum()
    loss.backward()
    policy = new_policy(folder)
    policy.forward_backward(rows, WeightedNegativeLogProb())
    gradient_VH = policy.masters.parameters["model.embed_tokens.weight"].grad
    torch.testing.assert_close(gradient_VH, embedding_VH.grad, rtol=1e-4, atol=1e-5)
    assert gradient_VH[5].norm() > 0.1
