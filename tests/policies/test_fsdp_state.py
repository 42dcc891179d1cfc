"""What is saved loads in Hugging Face and continues here, to the last digit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import FAMILIES, Clipped, new_policy, random_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import CheckpointError
from slimectl.policies import host_memory
from slimectl.policies.fsdp.master_weights import local_part
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.host_memory import HostMemory
from slimectl.policies.optimizer import OptimizerOptions

ModelDir = Callable[..., Path]
FALLING = OptimizerOptions(lr=1e-3, schedule="linear", decay_steps=6, warmup_steps=1)
ROUNDED = replace(FALLING, state_dtype="bfloat16")


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


@pytest.mark.parametrize(
    ("dtype", "optimizer"), [("float32", FALLING), ("bfloat16", FALLING), ("bfloat16", ROUNDED)], ids=str
)
def test_saved_loaded_and_continued_equals_uninterrupted_to_the_last_digit(
    model_dir: ModelDir, tmp_path: Path, dtype: str, optimizer: OptimizerOptions
):
    whole = new_policy(model_dir(), optimizer=optimizer, dtype=dtype)
    train(whole, range(2))
    whole.save(tmp_path)
    expected = train(whole, range(2, 4))
    resumed = new_policy(model_dir(), optimizer=optimizer, dtype=dtype)
    train(resumed, range(1))
    resumed.load(tmp_path)
    assert resumed.weight_version == "2"
    assert train(resumed, range(2, 4)) == expected
    assert_equal_weights(resumed, whole)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"offload": "parameters"}], ids=str)
def test_a_policy_that_slept_in_host_memory_goes_on_to_the_last_digit(
    model_dir: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
):
    awake, asleep = (new_policy(model_dir(), optimizer=FALLING, **options) for _ in range(2))
    asleep.memory = HostMemory(("cpu",))  # stands for the GPU
    for policy in (awake, asleep):
        train(policy, range(2))
    awake.save(tmp_path)
    asleep.log_probs(random_rows())
    expected_files = {file: file.read_bytes() for file in tmp_path.rglob("*.safetensors")}
    # Engines occupy the GPU from the push on: nothing may return to it, for a push or for a checkpoint either.
    monkeypatch.setattr(host_memory, "_restore", pytest.fail)
    asleep.sleep(keep_weights=True)
    assert_equal_weights(asleep, awake)
    asleep.sleep()
    asleep.save(tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.safetensors")} == expected_files
    occupied = [*asleep.masters.tensors.values(), *(p.data for p in asleep.model.parameters())]
    occupied += [moment for slots in asleep.optimizer.state.values() for moment in slots.values()]
    assert {local_part(tensor).untyped_storage().nbytes() for tensor in occupied} == {0}
    assert_equal_weights(asleep, awake)
    assert {local_part(tensor).untyped_storage().nbytes() for tensor in occupied} == {0}
    monkeypatch.undo()
    expected = train(awake, range(2, 4))
    assert train(asleep, range(2, 4)) == expected
    asleep.sleep()
    asleep.load(tmp_path)
    assert train(asleep, range(2, 4)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_untrained_weights_are_written_byte_for_byte(model_dir: ModelDir, tmp_path: Path, family: str):
    new_policy(model_dir(family)).save(tmp_path)
    original, written = load_file(model_dir(family) / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert list(original) == list(written)
    assert all(torch.equal(tensor, written[name]) for name, tensor in original.items())
    AutoTokenizer.from_pretrained(tmp_path)
    # Frozen in bfloat16 the model rounds what the file does not.
    frozen = dict(new_policy(model_dir(family), dtype="bfloat16", trains=False).weights())
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in original.items())


def test_an_expert_that_is_missing_is_named(model_dir: ModelDir, tmp_path: Path):
    weights = load_file(model_dir("qwen3_moe") / "model.safetensors")
    (tmp_path / "config.json").write_text((model_dir("qwen3_moe") / "config.json").read_text())
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    HFCheckpoint().write(tmp_path, iter(weights.items()))
    with pytest.raises(CheckpointError, match=r"no tensor for model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        new_policy(tmp_path)


def test_hugging_face_reloads_what_was_trained(model_dir: ModelDir, tmp_path: Path):
    policy = new_policy(model_dir())
    train(policy, range(1))
    policy.save(tmp_path)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"model.safetensors"}  # all that vLLM reads
    state = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    assert all(torch.equal(tensor, state[name]) for name, tensor in policy.weights())


def test_a_checkpoint_that_lacks_something_is_refused_by_name(model_dir: ModelDir, tmp_path: Path):
    policy = new_policy(model_dir())
    with pytest.raises(CheckpointError, match=r"no trainer\.json"):
        policy.load(model_dir())
    policy.save(tmp_path)
    whole = (tmp_path / "trainer" / "optimizer.safetensors").read_bytes()
    (tmp_path / "trainer" / "optimizer.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: cannot be read"):
        policy.load(tmp_path)
    (tmp_path / "trainer" / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        policy.load(tmp_path)
    (tmp_path / "trainer" / "trainer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"trainer\.json: damaged"):
        policy.load(tmp_path)


def test_optimizer_state_of_another_model_is_refused(model_dir: ModelDir, tmp_path: Path):
    new_policy(model_dir("llama")).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint is incomplete|the model has no|has shape"):
        new_policy(model_dir("qwen3")).load(tmp_path)
