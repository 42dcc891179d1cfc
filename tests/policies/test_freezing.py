"""Frozen parameters stay, cost no optimizer state, and are named by patterns that must match."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from policy_cases import Clipped, new_policy, random_rows
from safetensors.torch import load_file

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import SettingsError
from slimectl.policies.optimizer import trainable_names

ModelDir = Callable[..., Path]
NAMES = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]


def test_freezing_and_training_only_are_taken_together():
    assert trainable_names(NAMES) == set(NAMES)
    assert trainable_names(NAMES, freeze=["embed", "norm"]) == {NAMES[1]}
    assert trainable_names(NAMES, freeze=["embed"], train_only=["model"]) == {NAMES[1], NAMES[2]}


def test_patterns_that_make_no_sense_are_refused():
    with pytest.raises(SettingsError, match=r"'lm_haed' matches no parameter\. Names look like model\.layers\.0"):
        trainable_names(NAMES, freeze=["lm_haed"])
    with pytest.raises(SettingsError, match=r"'\(' is not a regular expression"):
        trainable_names(NAMES, train_only=["("])
    with pytest.raises(SettingsError, match="leave no parameter to train"):
        trainable_names(NAMES, freeze=["model"])


def test_frozen_parameters_stay_and_have_no_optimizer_state(model_dir: ModelDir, tmp_path: Path):
    policy = new_policy(model_dir("qwen3"), freeze=["embed_tokens", r"layers\.0\."])
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    policy.forward_backward(random_rows(), Clipped())
    assert policy.optim_step()["grad_norm"] > 0
    stayed = {name for name, tensor in policy.weights() if torch.equal(tensor, before[name])}
    assert stayed == {name for name in before if "embed_tokens" in name or "layers.0." in name}
    policy.save(tmp_path)
    moments = load_file(tmp_path / "trainer" / "optimizer.safetensors")
    assert {name.partition(".")[2] for name in moments} == set(before) - stayed
    policy.load(tmp_path)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_what_is_frozen_in_bfloat16_is_held_once_and_given_back_as_it_came(
    model_dir: ModelDir, tmp_path: Path, stored: torch.dtype
):
    source = HFCheckpoint().read(model_dir("llama_untied"))
    HFCheckpoint(dtype=stored).write(tmp_path, source)
    (tmp_path / "config.json").write_text((model_dir("llama_untied") / "config.json").read_text())
    given = dict(HFCheckpoint().read(tmp_path))
    policy = new_policy(tmp_path, dtype="bfloat16", freeze=["embed_tokens"])
    frozen = new_policy(tmp_path, dtype="bfloat16", trains=False)
    name = "model.embed_tokens.weight"
    assert policy.masters.tensors[name].dtype == stored
    assert {tensor.dtype for each in (policy, frozen) for _, tensor in each.weights()} == {torch.float32}
    assert all(torch.equal(tensor, given[name].float()) for name, tensor in frozen.weights())
    assert frozen.log_probs(random_rows()) == policy.log_probs(random_rows())
    policy.forward_backward(random_rows(), Clipped())
    policy.optim_step()
    assert torch.equal(dict(policy.weights())[name], given[name].float())
    assert not torch.equal(dict(policy.weights())["lm_head.weight"], given["lm_head.weight"].float())
