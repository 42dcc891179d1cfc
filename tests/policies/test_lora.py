"""Adapters are the merged matrices, learn alone, and come and go in peft's format."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import Clipped, assert_merged_are_weights, new_policy, padded_log_probs, random_rows
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import CheckpointError, SettingsError
from slimectl.executors.local import LocalExecutor
from slimectl.policies.fsdp.policy import FsdpCritic
from slimectl.policies.lora import LoraOptions
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.rank_group import DistributedPolicy, LockedPolicy

ModelDir = Callable[..., Path]
LORA = LoraOptions(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
Q = "model.layers.0.self_attn.q_proj"


def stepped(policy: Any, count: int = 3) -> list[dict[str, float]]:
    rows = random_rows()
    return [policy.forward_backward(rows, Clipped()) | policy.optim_step() for _ in range(count)]


def by_rule(folder: Path) -> dict[str, torch.Tensor]:
    """What peft computes from an adapter's files: W + alpha / r B A for each layer that has both."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    weights = dict(HFCheckpoint().read(Path(config["base_model_name_or_path"])))
    for name, a_KI in tensors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b_OK = tensors[name.replace("lora_A", "lora_B")]
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + config["lora_alpha"] / config["r"] * b_OK @ a_KI
    return weights


def test_adapters_begin_as_nothing(model_dir: ModelDir):
    rows = random_rows()
    plain, adapted = new_policy(model_dir()), new_policy(model_dir(), lora=LORA)
    assert adapted.log_probs(rows) == plain.log_probs(rows)
    base = dict(plain.weights())
    assert all(torch.equal(tensor, base[name]) for name, tensor in adapted.weights())
    assert [name for name, _ in adapted.weights()] == list(base)


def test_the_gradient_of_an_adapter_is_that_of_its_matrix(model_dir: ModelDir):
    rows = random_rows()
    plain, adapted = new_policy(model_dir()), new_policy(model_dir(), lora=LORA)
    for policy in (plain, adapted):
        policy.forward_backward(rows, Clipped())
    whole_OI = plain.masters.parameters[f"{Q}.weight"].grad
    a_KI = adapted.masters.tensors[f"{Q}.lora_A.weight"]
    b_OK = adapted.masters.parameters[f"{Q}.lora_B.weight"]
    assert b_OK.grad is not None
    assert whole_OI is not None
    assert torch.allclose(b_OK.grad, 2.0 * whole_OI @ a_KI.T, rtol=1e-4, atol=1e-6)  # d/dB of W + alpha / r B A
    assert adapted.masters.parameters[f"{Q}.weight"].grad is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_learn_and_the_merged_model_says_the_same(model_dir: ModelDir, tmp_path: Path, dtype: str):
    rows, policy = random_rows(), new_policy(model_dir("qwen3"), lora=LORA, dtype=dtype)
    assert {name.split(".")[-2] for name in policy.masters.trained} == {"lora_A", "lora_B"}
    assert all(report["grad_norm"] > 0 for report in stepped(policy))
    base = dict(HFCheckpoint().read(model_dir("qwen3")))
    moved = {name.split(".")[-2] for name, tensor in policy.weights() if not torch.equal(tensor, base[name])}
    assert moved == {"q_proj", "down_proj"}
    policy.save(tmp_path)
    merged = dict(HFCheckpoint().read(tmp_path))
    assert all(torch.equal(tensor, merged[name]) for name, tensor in policy.weights())
    expected = by_rule(tmp_path / "adapter")
    assert all(torch.allclose(tensor, expected[name], atol=1e-6) for name, tensor in merged.items())
    if dtype == "float32":
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        for found, wanted in zip(policy.log_probs(rows), padded_log_probs(model, rows), strict=True):
            assert found == pytest.approx(wanted.tolist(), abs=1e-4)


def test_what_was_saved_goes_on_to_the_last_digit_from_the_model_or_from_the_checkpoint(
    model_dir: ModelDir, tmp_path: Path
):
    policy = new_policy(model_dir(), lora=LORA)
    stepped(policy)
    policy.save(tmp_path)
    resumed, from_merged = new_policy(model_dir(), lora=LORA), new_policy(tmp_path, lora=LORA)
    for other in (resumed, from_merged):
        other.load(tmp_path)
        assert other.log_probs(random_rows()) == policy.log_probs(random_rows())
    reports = stepped(policy)
    assert stepped(resumed) == reports
    assert stepped(from_merged) == reports


def test_an_adapter_of_pefts_is_taken_up(model_dir: ModelDir, tmp_path: Path):
    policy = new_policy(model_dir(), lora=LORA)
    stepped(policy)
    policy.save(tmp_path)
    given = LoraOptions(4, 8.0, LORA.targets, load=tmp_path / "adapter")
    taken = new_policy(model_dir(), lora=given)
    assert taken.log_probs(random_rows()) == policy.log_probs(random_rows())
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(CheckpointError, match="use_dora is True, expected False"):
        new_policy(model_dir(), lora=given)
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        new_policy(model_dir(), lora=LoraOptions(4, 8.0, LORA.targets, load=tmp_path))


def test_a_target_that_is_no_layer_is_refused_with_those_that_are(model_dir: ModelDir):
    with pytest.raises(SettingsError, match=r"no linear layer is named qkv. Available: .*'q_proj'"):
        new_policy(model_dir(), lora=LoraOptions(4, 8.0, ("qkv",)))


@pytest.mark.slow
def test_two_ranks_equal_one(model_dir: ModelDir):
    build = partial(new_policy, lora=LORA, optimizer=OptimizerOptions(lr=1e-3))
    one, two = build(model_dir()), DistributedPolicy(LocalExecutor(), partial(build, model_dir()), ranks=2)
    try:
        for alone, ranked in zip(stepped(one), stepped(two), strict=True):
            assert ranked == pytest.approx(alone, rel=1e-4)
        for (name, alone), (other, ranked) in zip(one.weights(), two.weights(), strict=True):
            assert name == other
            assert torch.allclose(alone, ranked, atol=1e-4)
        for policy in (one, LockedPolicy(two)):
            assert_merged_are_weights(policy, model_dir())
    finally:
        two.close()


def test_a_critic_keeps_its_head_in_the_adapter(model_dir: ModelDir, tmp_path: Path):
    critic = FsdpCritic(model_dir(), HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-2), lora=LORA))
    rows = random_rows()
    for row in rows:
        row.old_log_probs = [0.0] * row.response_length
    stepped(critic, 2)
    critic.save(tmp_path)
    assert "base_model.model.score.weight" in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"] == ["score"]
    resumed = FsdpCritic(model_dir(), HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-2), lora=LORA))
    resumed.load(tmp_path)
    assert resumed.values(rows) == critic.values(rows)


def test_a_damaged_adapter_is_refused(model_dir: ModelDir, tmp_path: Path):
    policy = new_policy(model_dir(), lora=LORA)
    policy.save(tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "layers.1" not in name}, file)
    with pytest.raises(CheckpointError, match=r"no tensor for base_model\.model\.model\.layers\.1"):
        policy.load(tmp_path)


def test_peft_itself_reads_ours_and_we_read_its(model_dir: ModelDir, tmp_path: Path):
    import peft

    rows, policy = random_rows(), new_policy(model_dir("qwen3"), lora=LORA)
    stepped(policy)
    policy.save(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(model_dir("qwen3"), dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    for found, wanted in zip(policy.log_probs(rows), padded_log_probs(theirs, rows), strict=True):
        assert found == pytest.approx(wanted.tolist(), abs=1e-5)
    merged = theirs.merge_and_unload().state_dict()
    assert all(torch.allclose(tensor, merged[name], atol=1e-6) for name, tensor in policy.weights())
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(LORA.targets), init_lora_weights=False)
    plain = AutoModelForCausalLM.from_pretrained(model_dir("qwen3"), dtype=torch.float32)
    theirs = peft.get_peft_model(plain, config)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = new_policy(model_dir("qwen3"), lora=LoraOptions(4, 8.0, LORA.targets, load=tmp_path / "theirs"))
    for found, wanted in zip(ours.log_probs(rows), padded_log_probs(theirs, rows), strict=True):
        assert found == pytest.approx(wanted.tolist(), abs=1e-5)
