"""Packed equals padded, shared equals unshared, many packs equal one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from policy_cases import FAMILIES, Clipped, WeightedNegativeLogProb, new_policy, padded_log_probs, random_rows
from transformers import AutoModelForCausalLM

from slimectl.algorithms.packing import PrefixTrie
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import CheckpointError, RecordError, SettingsError
from slimectl.policies import causal_attention
from slimectl.policies.fsdp import attention
from slimectl.policies.fsdp.packed_batch import build_packed_batch
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.pack_plan import plan_pack
from slimectl.policies.recompute import Recompute
from slimectl.types import TrainingSample

ModelDir = Callable[..., Path]
ROUNDING = 5e-6
"""Relative; float32 gradients of these models (weights of scale 0.2) differ by 1e-6 between any two orders of sums."""


def hugging_face(model_dir: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_a_padded_forward_for_every_family(model_dir: ModelDir, family: str):
    rows = random_rows()
    with torch.no_grad():
        expected = padded_log_probs(hugging_face(model_dir(family)), rows, temperature=0.7)
    found = new_policy(model_dir(family), temperature=0.7).log_probs(rows)
    for found_R, expected_R in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(found_R), expected_R, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_a_padded_forward_for_every_family(model_dir: ModelDir, family: str):
    rows = random_rows()
    reference = hugging_face(model_dir(family))
    expected = sum(
        -(torch.tensor(row.loss_weights) * logprobs_R).sum()
        for row, logprobs_R in zip(rows, padded_log_probs(reference, rows), strict=True)
    )
    expected.backward()
    policy = new_policy(model_dir(family))
    metrics = policy.forward_backward(rows, WeightedNegativeLogProb())
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["weight"] == pytest.approx(sum(sum(row.loss_weights) for row in rows), rel=1e-6)
    for name, parameter in reference.named_parameters():
        scale = parameter.grad.norm().item()
        difference = (policy.masters.parameters[name].grad - parameter.grad).norm().item()
        assert difference <= 1e-5 * scale, name


@pytest.mark.parametrize(
    "other",
    [
        {"share_prefixes": False},
        {"max_tokens_per_pack": 20},
        {"recompute": Recompute("full")},
        {"recompute": Recompute("selective", ("core_attn",))},
        {"recompute": Recompute("selective", ("mlp", "moe"))},
        {"offload": "optimizer"},
        {"offload": "parameters"},
        {"offload": "parameters", "recompute": Recompute("full")},
    ],
    ids=str,
)
def test_sharing_packing_recomputation_and_offload_do_not_change_the_step(model_dir: ModelDir, other: dict):
    rows = random_rows(groups=4)
    plain, changed = (new_policy(model_dir("qwen3_moe"), **options) for options in ({}, other))
    for found, expected in zip(changed.log_probs(rows), plain.log_probs(rows), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    for name, value in plain.forward_backward(rows, Clipped()).items():
        assert changed.forward_backward(rows, Clipped())[name] == pytest.approx(value, rel=ROUNDING)
        changed.masters.drop_gradients()
    changed.forward_backward(rows, Clipped())
    assert changed.optim_step()["grad_norm"] == pytest.approx(plain.optim_step()["grad_norm"], rel=ROUNDING)


def test_log_probs_come_back_in_the_order_of_the_rows(model_dir: ModelDir):
    rows = random_rows(groups=4)
    policy = new_policy(model_dir(), max_tokens_per_pack=24)
    for found, backwards in zip(policy.log_probs(rows), reversed(policy.log_probs(rows[::-1])), strict=True):
        assert found == pytest.approx(backwards, abs=1e-5)
    assert [len(values) for values in policy.log_probs(rows)] == [row.response_length for row in rows]


def test_rows_without_weight_change_nothing_but_the_version(model_dir: ModelDir):
    rows = random_rows()
    for row in rows:
        row.loss_weights = [0.0] * row.response_length
    policy = new_policy(model_dir(), optimizer=OptimizerOptions(lr=1e-3, weight_decay=0.0))
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    assert policy.forward_backward(rows, Clipped())["loss"] == 0
    assert policy.optim_step() == {"grad_norm": 0.0, "lr": 1e-3}
    assert policy.weight_version == "1"
    assert policy.forward_backward([], Clipped()) == {"loss": 0.0}
    policy.optim_step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())


def test_a_response_of_no_tokens_and_of_one_token(model_dir: ModelDir):
    rows = [
        TrainingSample([1, 2, 3], 0, []),
        TrainingSample([1, 2, 3, 4], 1, [1.0]),
        TrainingSample([5, 6], 1, [1.0], group=1),
    ]
    policy = new_policy(model_dir())
    assert [len(values) for values in policy.log_probs(rows)] == [0, 1, 1]
    assert policy.forward_backward(rows, WeightedNegativeLogProb())["weight"] == 2.0


def test_the_clipped_gradient_norm_is_the_limit_but_the_reported_one_is_not(model_dir: ModelDir):
    policy = new_policy(model_dir(), optimizer=OptimizerOptions(lr=1e-3, clip_grad=0.5))
    policy.forward_backward(random_rows(), Clipped())
    gradients = [parameter.grad for parameter in policy.masters.parameters.values()]
    norm = policy.optim_step()["grad_norm"]
    assert norm > 0.5
    assert torch.nn.utils.get_total_norm(gradients).item() == pytest.approx(0.5, rel=1e-4)


def test_an_update_that_is_not_finite_is_left_out(model_dir: ModelDir):
    rows = random_rows()
    rows[0].loss_weights = [float("inf")] * rows[0].response_length
    policy = new_policy(model_dir())
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    policy.forward_backward(rows, WeightedNegativeLogProb())
    assert not torch.isfinite(torch.tensor(policy.optim_step()["grad_norm"]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())


def test_several_threads_add_up_the_gradients_of_a_shared_prompt_in_one_order():
    rows = [TrainingSample([*range(24), answer, 1, 2], 3, [1.0] * 3) for answer in range(64)]
    shared = PrefixTrie(tuple(range(64)), (26,) * 64, (0, *[24] * 63))
    layout = build_packed_batch(plan_pack(rows, [shared]), dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    query, states = (torch.randn(1, 4, len(layout.tokens_T), 16, generator=generator) for _ in range(2))
    threads, gradients = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        for _ in range(6):
            key = states.clone().requires_grad_()
            attention.packed_attention(torch.nn.Module(), query, key, key, None, layout=layout)[0].sum().backward()
            gradients.append(key.grad)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_falls(model_dir: ModelDir, dtype: str):
    rows = random_rows()
    policy = new_policy(model_dir(), dtype=dtype, max_tokens_per_pack=40)
    losses = []
    for _ in range(15):
        losses.append(policy.forward_backward(rows, WeightedNegativeLogProb())["loss"])
        policy.optim_step()
    assert losses[-1] < 0.7 * losses[0]


def test_a_row_with_constants_of_another_length_is_named(model_dir: ModelDir):
    rows = random_rows()
    rows[4].old_log_probs = None
    with pytest.raises(RecordError, match=r"row 4: old_log_probs: 0 values for \d+ response tokens"):
        new_policy(model_dir()).forward_backward(rows, Clipped())


@pytest.mark.parametrize("position", [0, -1])
def test_a_token_outside_the_vocabulary_is_named(model_dir: ModelDir, position: int):
    rows = random_rows()
    policy = new_policy(model_dir())
    vocabulary = json.loads((policy.model_dir / "config.json").read_text())["vocab_size"]
    rows[2].tokens[position] = vocabulary
    with pytest.raises(
        RecordError, match=rf"row 2: token {vocabulary} is not in the model's vocabulary of {vocabulary}"
    ):
        policy.log_probs(rows)


def test_models_that_cannot_be_trained_here_are_refused(model_dir: ModelDir, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        new_policy(tmp_path)
    config = json.loads((model_dir() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    with pytest.raises(CheckpointError, match=r"unheard_of.: transformers .* does not know it\. Upgrade"):
        new_policy(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    HFCheckpoint().write(tmp_path, HFCheckpoint().read(model_dir()))
    with pytest.raises(CheckpointError, match=r"no tensor for model\.layers\.2"):
        new_policy(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"mlp.*has shape"):
        new_policy(tmp_path)


def test_a_module_that_no_layer_has_cannot_be_recomputed(model_dir: ModelDir):
    with pytest.raises(SettingsError, match=r"train\.recompute_modules: moe is listed, but this model has no experts"):
        new_policy(model_dir(), recompute=Recompute("selective", ("moe",)))


@pytest.mark.parametrize("dense_scores", [0, 2**26])
def test_bfloat16_stays_near_float32_in_both_of_its_attentions(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch, dense_scores: int
):
    monkeypatch.setattr(causal_attention, "DENSE_SCORES", dense_scores)
    rows = random_rows(groups=4)
    exact, rounded = new_policy(model_dir("qwen3")), new_policy(model_dir("qwen3"), dtype="bfloat16")
    for found, expected in zip(rounded.log_probs(rows), exact.log_probs(rows), strict=True):
        assert found == pytest.approx(expected, abs=0.3)
    for policy in (exact, rounded):
        policy.forward_backward(rows, WeightedNegativeLogProb())
    assert rounded.optim_step()["grad_norm"] == pytest.approx(exact.optim_step()["grad_norm"], rel=0.03)
