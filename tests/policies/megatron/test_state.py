"""What is saved at one layout goes on at any other, with its optimizer; at the same one to the last digit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import new_policy, train
from rank_cases import STEADY, Ranks, megatron
from safetensors.torch import load_file, save_file

from slimectl.architectures.parallel import ParallelLayout
from slimectl.errors import CheckpointError
from slimectl.policies import host_memory
from slimectl.policies.host_memory import HostMemory
from slimectl.policies.optimizer import OptimizerOptions

ModelDir = Callable[..., Path]
FALLING = dataclasses.replace(STEADY, schedule="linear", decay_steps=8)
ROUNDED = dataclasses.replace(FALLING, state_dtype="bfloat16")


def snapshot(policy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def assert_goes_on(
    policy: Any, saved: Path, expected: list[dict[str, float]], weights: dict[str, torch.Tensor]
) -> None:
    policy.load(saved)
    at_rest = load_file(saved / "model.safetensors")
    assert all(torch.equal(tensor, at_rest[name]) for name, tensor in policy.weights())
    for found, wanted in zip(train(policy, range(2, 4)), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    for name, tensor in policy.weights():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-6)


LAYOUTS: list[dict[str, Any]] = [
    {"layout": ParallelLayout(tensor=2)},
    {"layout": ParallelLayout(pipeline=2), "distributed_optimizer": False},
    {"layout": ParallelLayout(pipeline=2, virtual_pipeline=2)},
    {"layout": ParallelLayout(context=2)},
    {"distributed_optimizer": True},
]


@pytest.fixture(scope="module")
def saved(four_layers: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """One process after two steps on disk; its next two steps, and its weights after them."""
    policy = megatron(four_layers("tied"), optimizer=FALLING)
    train(policy, range(2))
    folder = tmp_path_factory.mktemp("saved")
    policy.save(folder)
    return folder, train(policy, range(2, 4)), snapshot(policy)


@pytest.mark.slow
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_one_rank_saved_and_two_go_on(two: Ranks, four_layers: ModelDir, saved: Any, options: dict[str, Any]):
    assert_goes_on(two.build(four_layers("tied"), optimizer=FALLING, **options), *saved)


@pytest.mark.slow
@pytest.mark.parametrize("options", [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_two_ranks_saved_and_one_goes_on_or_they_to_the_last_digit(
    two: Ranks, four_layers: ModelDir, saved: Any, tmp_path: Path, options: dict[str, Any]
):
    two.build(four_layers("tied"), optimizer=FALLING, **options)
    train(two, range(2))
    two.save(tmp_path)
    reports, weights = train(two, range(2, 4)), snapshot(two)
    assert_goes_on(megatron(four_layers("tied"), optimizer=FALLING), tmp_path, *saved[1:])
    two.build(four_layers("tied"), optimizer=FALLING, **options)
    two.load(tmp_path)
    assert train(two, range(2, 4)) == reports
    assert all(torch.equal(tensor, weights[name]) for name, tensor in two.weights())


def test_the_fsdp_policy_goes_on_from_megatron_and_megatron_from_it(four_layers: ModelDir, saved: Any, tmp_path: Path):
    fsdp = new_policy(four_layers("tied"), optimizer=FALLING)
    assert_goes_on(fsdp, *saved)
    fsdp.load(saved[0])
    fsdp.save(tmp_path)
    ours, theirs = (load_file(folder / "trainer" / "optimizer.safetensors") for folder in (tmp_path, saved[0]))
    assert ours.keys() == theirs.keys()
    assert_goes_on(megatron(four_layers("tied"), optimizer=FALLING), tmp_path, *saved[1:])


@pytest.mark.parametrize("kind", ["experts", "latent", "sinks"])
def test_experts_go_on_in_either_policy(four_layers: ModelDir, tmp_path: Path, kind: str):
    first, fsdp = megatron(four_layers(kind)), new_policy(four_layers(kind), optimizer=STEADY)
    folders = tmp_path / "megatron", tmp_path / "fsdp"
    train(first, range(1))
    for folder, policy in zip(folders, (first, fsdp), strict=True):
        folder.mkdir()
        if policy is fsdp:
            policy.load(folders[0])
        policy.save(folder)
    for file in ("model.safetensors", "trainer/optimizer.safetensors"):
        of_megatron, of_fsdp = (load_file(folder / file) for folder in folders)
        assert of_megatron.keys() == of_fsdp.keys()
        assert all(torch.equal(tensor, of_fsdp[name]) for name, tensor in of_megatron.items())
    second = megatron(four_layers(kind))
    second.load(folders[1])
    reports = [train(policy, range(1, 3)) for policy in (first, fsdp, second)]
    assert reports[0] == reports[2]
    for found, expected in zip(reports[1], reports[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("optimizer", [FALLING, ROUNDED], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [True, False])
def test_bfloat16_goes_on_to_the_last_digit(
    four_layers: ModelDir, tmp_path: Path, distributed: bool, optimizer: OptimizerOptions
):
    options = {"dtype": "bfloat16", "optimizer": optimizer, "distributed_optimizer": distributed}
    whole = megatron(four_layers(), **options)
    train(whole, range(2))
    whole.save(tmp_path)
    expected = train(whole, range(2, 4))
    resumed = megatron(four_layers(), **options)
    resumed.load(tmp_path)
    assert resumed.weight_version == "2"
    assert train(resumed, range(2, 4)) == expected
    assert all(torch.equal(tensor, dict(resumed.weights())[name]) for name, tensor in whole.weights())


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"distributed_optimizer": False}], ids=str)
def test_a_policy_that_slept_in_host_memory_goes_on_to_the_last_digit(
    four_layers: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
):
    reports, files = [], []
    for sleeps in (False, True):
        policy = megatron(four_layers("experts"), optimizer=FALLING, **options)
        policy.memory = HostMemory(("cpu",))  # stands for the GPU
        first = train(policy, range(2))
        weights = snapshot(policy)
        if sleeps:
            # Engines occupy the GPU from the push on: nothing may return to it, for a checkpoint either.
            monkeypatch.setattr(host_memory, "_restore", pytest.fail)
            policy.sleep(keep_weights=True)
            policy.sleep()
            parameters = list(policy.chunks[0].parameters())
            occupied = [*parameters, *(parameter.main_grad for parameter in parameters)]
            assert {tensor.untyped_storage().nbytes() for tensor in occupied} == {0}
            assert all(torch.equal(tensor, weights[name]) for name, tensor in policy.weights())
            assert {tensor.untyped_storage().nbytes() for tensor in occupied} == {0}
        policy.save(tmp_path)
        files.append([file.read_bytes() for file in sorted(tmp_path.rglob("*.safetensors"))])
        monkeypatch.undo()
        reports.append([*first, *train(policy, range(2, 4))])
    assert reports[0] == reports[1]
    assert files[0] == files[1]
    assert len(files[0]) == 2


@pytest.mark.slow
def test_moments_in_bfloat16_are_those_of_one_process_on_two_data_ranks(
    two: Ranks, four_layers: ModelDir, tmp_path: Path
):
    one = megatron(four_layers("tied"), optimizer=ROUNDED)
    two.build(four_layers("tied"), optimizer=ROUNDED)
    for found, expected in zip(train(two, range(3)), train(one, range(3)), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    moments = []
    for policy, name in ((one, "one"), (two, "two")):
        (tmp_path / name).mkdir()
        policy.save(tmp_path / name)
        moments.append(load_file(tmp_path / name / "trainer" / "optimizer.safetensors"))
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in moments[0].values())
    # The order of sums decides the few roundings that lie beside the noise.
    equal = torch.cat([(moments[0][name] == tensor).view(-1) for name, tensor in moments[1].items()])
    assert equal.float().mean() > 0.999


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "tied"])
def test_untrained_weights_are_written_byte_for_byte(four_layers: ModelDir, tmp_path: Path, kind: str, dtype: str):
    """Frozen ones too, that bfloat16 computation would round."""
    megatron(four_layers(kind), dtype=dtype, freeze=["embed_tokens"]).save(tmp_path)
    original, written = load_file(four_layers(kind) / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert list(original) == list(written)
    assert all(torch.equal(tensor, written[name]) for name, tensor in original.items())


def altered(source: Path, target: Path, **changes: Any) -> Path:
    """A copy whose tensors are changed: None takes one away."""
    tensors = load_file(source / "model.safetensors") | {k: v for k, v in changes.items() if v is not None}
    tensors = {name: tensor for name, tensor in tensors.items() if changes.get(name, tensor) is not None}
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


def test_weights_that_do_not_fit_the_config_are_refused_by_name(four_layers: ModelDir, tmp_path: Path):
    up = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=rf"no tensor for {up}"):
        megatron(altered(four_layers(), tmp_path, **{up: None}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.bias: qwen3 models have no such tensor"):
        megatron(altered(four_layers(), tmp_path, **{"model.layers.9.bias": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=rf"{up} has shape \[2, 64\], but \[96, 64\] is expected"):
        megatron(altered(four_layers(), tmp_path, **{up: torch.zeros(2, 64)}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        megatron(altered(four_layers("tied"), tmp_path, **{"lm_head.weight": torch.zeros(259, 64)}))


def test_a_tied_head_that_is_stored_comes_back(four_layers: ModelDir, tmp_path: Path):
    embedding = load_file(four_layers("tied") / "model.safetensors")["model.embed_tokens.weight"]
    policy = megatron(altered(four_layers("tied"), tmp_path, **{"lm_head.weight": embedding.clone()}))
    train(policy, range(1))
    weights = dict(policy.weights())
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert not torch.equal(weights["lm_head.weight"], embedding)


def test_a_damaged_optimizer_is_refused(four_layers: ModelDir, saved: Any, tmp_path: Path):
    policy = megatron(four_layers("tied"))
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    optimizer = tmp_path / "trainer" / "optimizer.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: cannot be read"):
        policy.load(tmp_path)
    (tmp_path / "trainer" / "trainer.json").write_text(json.dumps({"format": 99, "step": 1}))
    with pytest.raises(CheckpointError, match=r"trainer\.json: damaged"):
        policy.load(tmp_path)
