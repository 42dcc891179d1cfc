"""Megatron's own checkpoints: saved at one layout, loaded at another and back, optimizer included."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.hostile_pickles import archive, payloads
from policies.policy_cases import Clipped, random_rows
from rank_cases import Ranks, megatron

from slimectl.architectures.parallel import ParallelLayout
from slimectl.builders import convert
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.checkpoints.torch_dist.metadata import read_metadata
from slimectl.errors import CheckpointError

ModelDir = Callable[..., Path]


def train(policy: Any, steps: range) -> list[dict[str, float]]:
    made = []
    for step in steps:
        rows = random_rows(groups=4, seed=step)
        made.append(policy.forward_backward(rows, Clipped()) | policy.optim_step())
    return made


@pytest.mark.parametrize("kind", ["tied", "dense"])
def test_from_one_rank_to_tensor_and_pipeline_ranks_and_back(
    four: Ranks, four_layers: ModelDir, tmp_path: Path, kind: str
):
    one = megatron(four_layers(kind))
    train(one, range(2))
    for name in ("one", "four"):
        (tmp_path / name).mkdir()
    one.save_torch_dist(tmp_path / "one")
    expected = train(one, range(2, 6))
    four.build(four_layers(kind), layout=ParallelLayout(tensor=2, pipeline=2))
    four.load_torch_dist(tmp_path / "one")
    found = train(four, range(2, 4))
    four.save_torch_dist(tmp_path / "four")
    back = megatron(four_layers(kind))
    back.load_torch_dist(tmp_path / "four")
    assert back.weight_version == "4"
    for report, wanted in zip([*found, *train(back, range(4, 6))], expected, strict=True):
        assert report == pytest.approx(wanted, rel=1e-5)
    for (name, tensor), (other, wanted) in zip(back.weights(), one.weights(), strict=True):
        assert name == other
        torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": False}, {"dtype": "bfloat16"}], ids=str)
def test_at_the_same_layout_to_the_last_digit(four_layers: ModelDir, tmp_path: Path, options: dict[str, Any]):
    policy = megatron(four_layers("experts"), **options)
    train(policy, range(2))
    policy.save_torch_dist(tmp_path)
    expected = train(policy, range(2, 4))
    other = megatron(four_layers("experts"), **options)
    other.load_torch_dist(tmp_path)
    assert train(other, range(2, 4)) == expected


def test_before_the_first_update(four_layers: ModelDir, tmp_path: Path):
    policy = megatron(four_layers())
    policy.save_torch_dist(tmp_path)
    expected = train(policy, range(2))
    policy.load_torch_dist(tmp_path)
    assert train(policy, range(2)) == expected


def test_slimectl_convert_reads_it(four_layers: ModelDir, tmp_path: Path):
    policy = megatron(four_layers("tied"))
    train(policy, range(1))
    (tmp_path / "saved").mkdir()
    policy.save_torch_dist(tmp_path / "saved")
    convert(str(tmp_path / "saved"), tmp_path / "hf", to="hf")
    written = dict(HFCheckpoint().read(tmp_path / "hf"))
    assert all(torch.equal(tensor, written.pop(name)) for name, tensor in policy.weights())
    assert not written


def test_a_folder_that_is_no_such_checkpoint_is_refused(four_layers: ModelDir):
    with pytest.raises(CheckpointError, match="cannot be resumed from as a torch_dist checkpoint"):
        megatron(four_layers()).load_torch_dist(four_layers())


def test_a_stranger_s_checkpoint_runs_nothing_wherever_the_command_stands(four_layers: ModelDir, tmp_path: Path):
    saved, proof = tmp_path / "saved", tmp_path / "proof"
    saved.mkdir()
    policy = megatron(four_layers())
    policy.save_torch_dist(saved)
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
                policy.load_torch_dist(saved)
            assert "\n" not in str(error.value)
    assert objects
    assert not proof.exists()
