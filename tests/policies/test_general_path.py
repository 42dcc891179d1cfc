"""The general path: any causal model of transformers, padded, against transformers' logits a row at a time."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import (
    SHAPE,
    Clipped,
    WeightedNegativeLogProb,
    flat_log_probs,
    new_policy,
    plain_loop,
    random_rows,
    write_random_model,
)
from transformers import AutoConfig, AutoModelForCausalLM

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import CheckpointError, SettingsError
from slimectl.executors.local import LocalExecutor
from slimectl.policies import lm_head
from slimectl.policies.fsdp import build
from slimectl.policies.fsdp.build import empty_model
from slimectl.policies.fsdp.padded_model import PaddedModel, report_general_path
from slimectl.policies.fsdp.policy import FsdpActorCritic, FsdpCritic
from slimectl.policies.lora import LoraOptions
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.rank_group import DistributedPolicy
from slimectl.policies.recompute import Recompute

OLD = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": SHAPE | {"sliding_window": 8, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "gpt_oss": SHAPE | EXPERTS | {"sliding_window": 8},  # sinks
    "falcon_h1": SHAPE | MAMBA | {"mamba_d_ssm": 64},  # attention and a state-space model in each layer
    "lfm2": SHAPE | {"layer_types": ["conv", "full_attention"]},
    "cohere2": SHAPE | {"logit_scale": 0.25, "layer_types": ["sliding_attention", "full_attention"]},
    "gptj": OLD | {"rotary_dim": 4},  # a head with a bias
    "gpt2": OLD,
    "llama4_text": SHAPE | EXPERTS | {"intermediate_size_mlp": 48},
    "opt": SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32},  # its base model has a decoder
}
NewModel = Callable[..., Path]


@pytest.fixture(scope="module")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> NewModel:
    """Return the folder of a model with random weights."""
    folders: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in folders:
            folder = tmp_path_factory.mktemp(model_type)
            folders[model_type] = write_random_model(folder, model_type, **MODELS[model_type])
        return folders[model_type]

    return make


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All models take the general path, also those that can be packed."""
    monkeypatch.setattr(build, "_unsupported", lambda hf: "is padded for a test")
    return


@pytest.mark.parametrize("model_type", MODELS)
def test_log_probs_and_gradients_are_those_of_single_rows(
    model_type: str, new_model: NewModel, general: None, monkeypatch: pytest.MonkeyPatch
):
    folder, rows = new_model(model_type), random_rows(groups=2)
    expected_R, gradients = plain_loop(folder, rows, temperature=0.7)
    monkeypatch.setattr(lm_head, "CHUNK_LOGITS", 256 * 7)
    monkeypatch.setattr(lm_head, "KEPT_LOGITS", 256 * 7)
    policy = new_policy(folder, temperature=0.7, max_tokens_per_pack=60)
    assert isinstance(policy.model, PaddedModel)
    torch.testing.assert_close(flat_log_probs(policy, rows), expected_R, rtol=0, atol=1e-5)
    policy.forward_backward(rows, WeightedNegativeLogProb())
    for name, parameter in policy.masters.parameters.items():
        expected = torch.zeros_like(parameter) if gradients[name] is None else gradients[name]
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "recompute"),
    [
        ("gpt2", Recompute("full")),
        ("gpt2", Recompute("selective", ("core_attn", "mlp"))),
        ("lfm2", Recompute("full")),
        ("gpt_oss", Recompute("selective", ("moe",))),
    ],
    ids=str,
)
def test_recomputation_changes_nothing(model_type: str, recompute: Recompute, new_model: NewModel, general: None):
    rows, loss = random_rows(groups=2), WeightedNegativeLogProb(needs_entropy=True)
    folder = new_model(model_type)
    policies = new_policy(folder), new_policy(folder, recompute=recompute)
    sums = [policy.forward_backward(rows, loss) for policy in policies]
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)
    norms = [policy.optim_step()["grad_norm"] for policy in policies]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_attention_that_is_not_exchangeable_is_not_recomputed_alone(new_model: NewModel):
    with pytest.raises(SettingsError, match=r"core_attn cannot be recomputed in a gptj model\. Set"):
        new_policy(new_model("gptj"), recompute=Recompute("selective", ("core_attn",)))


@pytest.mark.parametrize("model_type", ["gpt_oss", "gptj", "lfm2"])
def test_a_trained_model_loads_in_transformers_and_resumes_exactly(
    model_type: str, new_model: NewModel, general: None, tmp_path: Path
):
    policy, rows = new_policy(new_model(model_type)), random_rows(groups=2)
    policy.forward_backward(rows, Clipped())
    policy.optim_step()
    policy.save(tmp_path)
    expected_R, _ = plain_loop(tmp_path, rows, temperature=1.0)
    torch.testing.assert_close(flat_log_probs(policy, rows), expected_R, rtol=0, atol=1e-5)
    resumed = new_policy(new_model(model_type))
    resumed.load(tmp_path)
    for each in (policy, resumed):
        each.forward_backward(rows, Clipped())
        each.optim_step()
    for (name, tensor), (resumed_name, resumed_tensor) in zip(policy.weights(), resumed.weights(), strict=True):
        assert name == resumed_name
        assert torch.equal(tensor, resumed_tensor)


def test_adapters_are_merged_into_what_transformers_loads(new_model: NewModel, tmp_path: Path):
    lora = LoraOptions(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "fc_in"))
    policy, rows = new_policy(new_model("gptj"), lora=lora, optimizer=OptimizerOptions(lr=0.05)), random_rows(groups=2)
    before_R = flat_log_probs(policy, rows)
    for _ in range(2):
        policy.forward_backward(rows, Clipped())
        policy.optim_step()
    policy.save(tmp_path)
    expected_R, _ = plain_loop(tmp_path, rows, temperature=1.0)
    found_R = flat_log_probs(policy, rows)
    torch.testing.assert_close(found_R, expected_R, rtol=0, atol=1e-4)
    assert (found_R - before_R).abs().max() > 1e-3


def test_a_critic_and_an_actor_critic_have_values_of_the_base_models_states(new_model: NewModel):
    folder, rows = new_model("gpt2"), random_rows(groups=1)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    head_1H = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    expected = []
    for row in rows:
        with torch.no_grad():
            states_TH = hf.transformer(torch.tensor([row.tokens[:-1]])).last_hidden_state[0]
        expected.append((states_TH[-row.response_length :] @ head_1H[0]).tolist())
    options = TrainerOptions(optimizer=OptimizerOptions(lr=0.1))
    for kind in (FsdpCritic, FsdpActorCritic):
        trainer = kind(folder, HFCheckpoint(), options)
        trainer.masters.tensors["score.weight"].copy_(head_1H)
        trainer.masters.copy_to_model()
        for found, values in zip(trainer.values(rows), expected, strict=True):
            assert found == pytest.approx(values, abs=1e-4)
    assert flat_log_probs(trainer, rows).tolist() == flat_log_probs(new_policy(folder), rows).tolist()


@pytest.mark.slow
def test_two_ranks_equal_one(new_model: NewModel):
    folder, rows = new_model("gptj"), random_rows(groups=3)
    two = DistributedPolicy(LocalExecutor(), partial(new_policy, folder, max_tokens_per_pack=40), ranks=2)
    one = new_policy(folder)
    try:
        torch.testing.assert_close(flat_log_probs(two, rows), flat_log_probs(one, rows), rtol=0, atol=1e-5)
        for batch in (rows, rows[:1]):  # the second rank has no row of the last batch
            loss = WeightedNegativeLogProb(needs_entropy=True)
            assert two.forward_backward(batch, loss) == pytest.approx(one.forward_backward(batch, loss), rel=1e-5)
            assert two.optim_step() == pytest.approx(one.optim_step(), rel=1e-5)
        for (name, tensor), (expected_name, expected) in zip(two.weights(), one.weights(), strict=True):
            assert name == expected_name
            torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=1e-4)
    finally:
        two.close()


def test_a_vision_model_of_another_kind_trains_its_decoder_only(tmp_path: Path):
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3", text_config=SHAPE | {"pad_token_id": 0}, vision_config=vision | {"image_size": 28, "patch_size": 14}
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    policy, rows = new_policy(tmp_path), random_rows(groups=1)
    assert {name.split(".")[1] for name in policy.masters.trained} == {"language_model"}
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    policy.forward_backward(rows, WeightedNegativeLogProb())
    policy.optim_step()
    changed = {name for name, tensor in policy.weights() if not torch.equal(tensor, before[name])}
    assert changed
    assert not any("vision" in name or "projector" in name for name in changed)


def test_weights_that_transformers_keeps_in_float32_are_not_rounded(tmp_path: Path):
    torch.manual_seed(0)
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0}
    config = AutoConfig.for_model("ernie4_5_moe", **SHAPE | experts | {"pad_token_id": 0})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in expected.named_parameters()}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    found = new_policy(tmp_path, dtype="bfloat16").masters.parameters
    assert {name: parameter.dtype for name, parameter in found.items()} == dtypes


def test_weights_of_bfloat16_are_near_those_of_float32(new_model: NewModel):
    rows, folder = random_rows(groups=2), new_model("gpt2")
    rounded_R, exact_R = (flat_log_probs(new_policy(folder, dtype=dtype), rows) for dtype in ("bfloat16", "float32"))
    assert (rounded_R - exact_R).abs().mean() < 0.1


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt2", "has no layers at model.layers"),
        ("opt", "has no layers at model.layers"),
        ("gptj", "does not accept a custom attention function"),
    ],
)
def test_a_line_says_once_why_a_model_is_not_packed_and_what_it_costs(
    model_type: str, reason: str, new_model: NewModel, caplog: pytest.LogCaptureFixture
):
    report_general_path.cache_clear()
    with caplog.at_level(logging.INFO, logger="slimectl"):
        for _ in range(2):
            new_policy(new_model(model_type), trains=False)
    [line] = [record.getMessage() for record in caplog.records if "general path" in record.getMessage()]
    assert line == (
        f"{model_type} takes the general path of fsdp ({reason}): rows are padded to the longest of a pack and do not"
        " share prefixes."
    )


def test_routing_is_not_replayed(new_model: NewModel):
    with pytest.raises(SettingsError, match=r"use_rollout_routing_replay: gptj takes the general path"):
        new_policy(new_model("gptj"), rollout_routing_replay=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nova9"}, r"model_type 'nova9': transformers .* does not know it. Upgrade transformers"),
        (
            {"model_type": "nova9", "auto_map": {"AutoConfig": "a.B"}},
            r"it needs Python code of its checkpoint",
        ),
        ({"model_type": "t5"}, r"t5 is not a causal language model in transformers"),
        ({}, r"model_type 'None'"),
    ],
)
def test_a_model_that_transformers_does_not_know_is_an_error_of_one_line(
    config: dict[str, Any], message: str, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as error:
        empty_model(tmp_path)
    assert "\n" not in str(error.value)
