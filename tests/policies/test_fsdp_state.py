"""What is saved loads in Hugging Face and continues here, to the last digit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from policy_cases import FAMILIES, Clipped, new_policy, random_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slimectl.errors import CheckpointError
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions

ModelDir = Callable[..., Path]
FALLING = OptimizerOptions(lr=1e-3, schedule="linear", decay_steps=6, warmup_steps=1)


def train(policy: FsdpPolicy, steps: range) -> list[dict[str, float]]:
    reports = []
    for step in steps:
        metrics = policy.forward_backward(random_rows(seed=step), Clipped())
        reports.append(metrics | policy.optim_step())
    return reports


def assert_equal_weights(one: FsdpPolicy, other: FsdpPolicy) -> None:
    for (name, tensor), (other_name, other_tensor) in zip(one.weights(), other.weights(), strict=True):
        assert name == other_name
        assert torch.equal(tensor, other_tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_loaded_and_continued_equals_uninterrupted_to_the_last_digit(
    model_dir: ModelDir, tmp_path: Path, dtype: str
):
    whole = new_policy(model_dir(), optimizer=FALLING, dtype=dtype)
    train(whole, range(2))
    whole.save(tmp_path)
    expected = train(whole, range(2, 4))
    resumed = new_policy(model_dir(), optimizer=FALLING, dtype=dtype)
    train(resumed, range(1))
    resumed.load(tmp_path)
    assert resumed.weight_version == "2"
    assert train(resumed, range(2, 4)) == expected
    assert_equal_weights(resumed, whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_untrained_weights_are_written_byte_for_byte(model_dir: ModelDir, tmp_path: Path, family: str):
    new_policy(model_dir(family)).save(tmp_path)
    original, written = load_file(model_dir(family) / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert list(original) == list(written)
    assert all(torch.equal(tensor, written[name]) for name, tensor in original.items())
    AutoTokenizer.from_pretrained(tmp_path)


def test_hugging_face_reloads_what_was_trained(model_dir: ModelDir, tmp_path: Path):
    policy = new_policy(model_dir())
    train(policy, range(1))
    policy.save(tmp_path)
    state = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    assert all(torch.equal(tensor, state[name]) for name, tensor in policy.weights())


def test_a_checkpoint_that_lacks_something_is_refused_by_name(model_dir: ModelDir, tmp_path: Path):
    policy = new_policy(model_dir())
    with pytest.raises(CheckpointError, match=r"no trainer\.json"):
        policy.load(model_dir())
    policy.save(tmp_path)
    whole = (tmp_path / "optimizer.safetensors").read_bytes()
    (tmp_path / "optimizer.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: cannot be read"):
        policy.load(tmp_path)
    (tmp_path / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        policy.load(tmp_path)
    (tmp_path / "trainer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"trainer\.json: damaged"):
        policy.load(tmp_path)


def test_optimizer_state_of_another_model_is_refused(model_dir: ModelDir, tmp_path: Path):
    new_policy(model_dir("llama")).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint is incomplete|the model has no|has shape"):
        new_policy(model_dir("qwen3")).load(tmp_path)
