"""Megatron's own checkpoints: saved at one layout, loaded at another and back, optimizer included."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.hostile_pickles import archive, payloads
from policies.policy_cases import train
from rank_cases import STEADY, Ranks, megatron

from slimectl.architectures.parallel import ParallelLayout
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.checkpoints.torch_dist.mapping import ModelCheckpoint
from slimectl.checkpoints.torch_dist.metadata import read_metadata
from slimectl.errors import CheckpointError, SettingsError
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.runtime.builders import check_policy, convert_checkpoint
from slimectl.runtime.builders.models import version_of
from slimectl.settings import Settings

pytestmark = pytest.mark.slow

ModelDir = Callable[..., Path]
TORCH_DIST = {"save_format": "torch_dist"}
ROUNDED = {"optimizer": OptimizerOptions(lr=1e-3, state_dtype="bfloat16")}


@pytest.mark.parametrize("kind", ["tied", "dense", "sinks"])
def test_from_one_rank_to_tensor_and_pipeline_ranks_and_back(
    four: Ranks, four_layers: ModelDir, tmp_path: Path, kind: str
):
    one = megatron(four_layers(kind), **TORCH_DIST)
    train(one, range(1))
    for name in ("one", "four"):
        (tmp_path / name).mkdir()
    one.save(tmp_path / "one")
    expected = train(one, range(1, 3))
    four.build(four_layers(kind), **TORCH_DIST, layout=ParallelLayout(tensor=2, pipeline=2))
    four.load(tmp_path / "one")
    found = train(four, range(1, 2))
    four.save(tmp_path / "four")
    back = megatron(four_layers(kind))
    back.load(tmp_path / "four")
    assert back.weight_version == "2"
    for report, wanted in zip([*found, *train(back, range(2, 3))], expected, strict=True):
        assert report == pytest.approx(wanted, rel=1e-5)
    for (name, tensor), (other, wanted) in zip(back.weights(), one.weights(), strict=True):
        assert name == other
        torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": False}, {"dtype": "bfloat16"}, ROUNDED], ids=str)
def test_at_the_same_layout_to_the_last_digit(four_layers: ModelDir, tmp_path: Path, options: dict[str, Any]):
    policy = megatron(four_layers("experts"), **TORCH_DIST, **options)
    train(policy, range(2))
    policy.save(tmp_path)
    expected = train(policy, range(2, 4))
    other = megatron(four_layers("experts"), **options)
    other.load(tmp_path)
    assert train(other, range(2, 4)) == expected


def test_over_a_pipeline_whose_ends_share_an_embedding_of_odd_size(four: Ranks, four_layers: ModelDir, tmp_path: Path):
    """mcore keeps it in a bucket of its own, with padding behind it."""
    four.build(four_layers("tied"), layout=ParallelLayout(pipeline=2), **TORCH_DIST)
    train(four, range(2))
    four.save(tmp_path)
    expected = train(four, range(2, 4))
    four.load(tmp_path)
    assert train(four, range(2, 4)) == expected


def test_before_the_first_update(four_layers: ModelDir, tmp_path: Path):
    policy = megatron(four_layers(), **TORCH_DIST)
    policy.save(tmp_path)
    expected = train(policy, range(2))
    policy.load(tmp_path)
    assert train(policy, range(2)) == expected


@pytest.fixture(scope="module")
def trained(four_layers: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """What a policy saved after a step, and the policy."""
    policy, saved = megatron(four_layers("tied"), **TORCH_DIST), tmp_path_factory.mktemp("saved")
    train(policy, range(1))
    policy.save(saved)
    return saved, policy


def test_what_it_holds_is_a_model_for_every_trainer_and_for_convert(
    trained: tuple[Path, Any], four_layers: ModelDir, tmp_path: Path
):
    saved, policy = trained
    convert_checkpoint(str(saved), tmp_path / "hf")
    reference = megatron(four_layers("tied"), trains=False)
    reference.load(saved)
    assert (reference.weight_version, version_of(saved)) == ("1", "1")
    for read in (
        HFCheckpoint().read(tmp_path / "hf"),
        FsdpPolicy(saved, ModelCheckpoint(), TrainerOptions(optimizer=STEADY)).weights(),
        megatron(saved).weights(),
        reference.weights(),
    ):
        written = dict(read)
        assert all(torch.equal(tensor, written.pop(name)) for name, tensor in policy.weights())
        assert not written


def test_the_optimizer_goes_on_with_the_options_of_now(trained: tuple[Path, Any], four_layers: ModelDir):
    later = megatron(four_layers("tied"), optimizer=replace(STEADY, weight_decay=0.7, eps=1e-5, betas=(0.5, 0.6)))
    later.load(trained[0])
    for group in later.optimizer.chained_optimizers[0].param_groups:
        assert (group["weight_decay"], group["eps"], group["betas"]) == (0.7 * group["wd_mult"], 1e-5, (0.5, 0.6))


def test_what_does_not_go_on_from_it_is_refused(trained: tuple[Path, Any], four_layers: ModelDir, tmp_path: Path):
    saved, policy = trained
    with pytest.raises(
        CheckpointError, match=r'only train.backend = "megatron" can resume\. Start from its weights inst'
    ):
        FsdpPolicy(saved, ModelCheckpoint(), TrainerOptions(optimizer=STEADY)).load(saved)
    shutil.copytree(saved, tmp_path / "cut")
    (tmp_path / "cut" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="cannot be resumed from as a torch_dist checkpoint"):
        policy.load(tmp_path / "cut")
    with pytest.raises(CheckpointError, match=r"no trainer.json\. These are weights without trainer state\. Start"):
        policy.load(four_layers())


def test_a_stranger_s_checkpoint_runs_nothing_wherever_the_command_stands(four_layers: ModelDir, tmp_path: Path):
    saved, proof = tmp_path / "saved", tmp_path / "proof"
    saved.mkdir()
    policy = megatron(four_layers(), **TORCH_DIST)
    policy.save(saved)
    genuine = {name: (saved / name).read_bytes() for name in (".metadata", "common.pt")}
    metadata = read_metadata(saved)
    objects = [index for index in metadata.storage_data if "_extra_state" in index.fqn]
    attacks = payloads(proof)
    names = (
        "GLOBAL",
        "INST",
        "STACK_GLOBAL os system",
        "STACK_GLOBAL torch.distributed._shard.api torch.ctypes.util.subprocess.Popen",
    )
    for attack in (attacks[name] for name in names):
        hostile = archive(attack)
        (saved / "object.distcp").write_bytes(hostile)
        for index in objects:
            place = metadata.storage_data[index]
            place.relative_path, place.offset, place.length = "object.distcp", 0, len(hostile)
        for name, data in (
            (".metadata", attack),
            ("common.pt", hostile),
            ("common.pt", attack),
            (".metadata", pickle.dumps(metadata)),
        ):
            for other, whole in genuine.items():
                (saved / other).write_bytes(data if other == name else whole)
            with pytest.raises(CheckpointError, match="cannot be resumed from as a torch_dist checkpoint") as error:
                policy.load(saved)
            assert "\n" not in str(error.value)
    assert objects
    assert not proof.exists()


def test_a_pipeline_stage_without_experts_is_refused_before_training(four_layers: ModelDir):
    """megatron-core 0.16.1 ends in an assertion when it saves such a stage. The first of these layers is dense."""
    sections: dict[str, Any] = {
        "model": {"path": str(four_layers("latent"))},
        "train": {"backend": "megatron"},
        "megatron": {**TORCH_DIST, "pipeline_model_parallel_size": 4},
        "cluster": {"actor_num_gpus_per_node": 4},
    }
    settings = Settings.model_validate(sections)
    with pytest.raises(SettingsError, match=r"every pipeline stage, and stage 0 has only dense layers\. Set hf"):
        check_policy(settings)
