"""Checkpoints in the background, without moments, and optimizers that start again."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import Clipped, add_value_head, new_policy, random_rows
from safetensors.torch import load_file

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import CheckpointError
from slimectl.executors.local import LocalExecutor
from slimectl.policies.fsdp.policy import FsdpActorCritic, FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.rank_group import DistributedPolicy

ModelDir = Callable[..., Path]
STEADY = OptimizerOptions(lr=1e-3)


def train(policy: Any, *seeds: int) -> list[dict[str, float]]:
    return [policy.forward_backward(random_rows(seed=seed), Clipped()) | policy.optim_step() for seed in seeds]


def wait_for(policy: Any) -> None:
    pause = threading.Event()
    while not policy.is_saved():
        pause.wait(0.01)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


class Held(HFCheckpoint):
    """Writes once `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, path: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        assert self.go.wait(60)
        super().write(path, tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_save_in_the_background_has_the_state_of_its_start(model_dir: ModelDir, tmp_path: Path, dtype: str):
    checkpoint = Held()
    policy = FsdpPolicy(model_dir("qwen3_moe"), checkpoint, TrainerOptions(optimizer=STEADY, dtype=dtype))
    train(policy, 0, 1)
    for name in ("now", "later"):
        (tmp_path / name).mkdir()
    policy.save_in_background(tmp_path / "later")
    train(policy, 2, 3)  # while it is held back
    assert not policy.is_saved()
    assert contents(tmp_path / "later") == {}
    checkpoint.go.set()
    wait_for(policy)
    same = FsdpPolicy(model_dir("qwen3_moe"), HFCheckpoint(), TrainerOptions(optimizer=STEADY, dtype=dtype))
    train(same, 0, 1)
    same.save(tmp_path / "now")
    assert contents(tmp_path / "later") == contents(tmp_path / "now")


def test_the_value_head_of_a_shared_critic_is_saved_in_the_background(model_dir: ModelDir, tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    policy = FsdpActorCritic(add_value_head(model_dir(), folder), HFCheckpoint(), TrainerOptions(optimizer=STEADY))
    for name in ("now", "later"):
        (tmp_path / name).mkdir()
    policy.save(tmp_path / "now")
    policy.save_in_background(tmp_path / "later")
    wait_for(policy)
    assert "trainer/value_head.safetensors" in contents(tmp_path / "now")
    assert contents(tmp_path / "later") == contents(tmp_path / "now")


def test_an_error_of_the_writer_is_raised_once(model_dir: ModelDir, tmp_path: Path):
    policy = new_policy(model_dir())
    policy.save_in_background(tmp_path / "missing" / "folder")
    with pytest.raises(FileNotFoundError, match="missing"):
        wait_for(policy)
    assert policy.is_saved()


@pytest.mark.slow
def test_two_ranks_save_in_the_background(model_dir: ModelDir, tmp_path: Path):
    build = partial(new_policy, model_dir("qwen3_moe"), optimizer=STEADY)
    with closing(DistributedPolicy(LocalExecutor(), build, ranks=2)) as two:
        train(two, 0)
        for name in ("now", "later", "reset"):
            (tmp_path / name).mkdir()
        two.save(tmp_path / "now")
        two.save_in_background(tmp_path / "later")
        train(two, 1)
        wait_for(two)
        assert contents(tmp_path / "later") == contents(tmp_path / "now")
        two.save_in_background(tmp_path / "missing" / "folder")
        with pytest.raises(FileNotFoundError, match="missing"):
            wait_for(two)
        two.reset_optimizer()
        two.save(tmp_path / "reset")
        moments = load_file(tmp_path / "reset" / "trainer" / "optimizer.safetensors")
        assert not any(tensor.any() for tensor in moments.values())


def first_step(policy: Any) -> list[dict[str, float]]:
    """Train the first step after new moments: its metrics and, as one sum, the new weights."""
    metrics = train(policy, 7)
    return [*metrics, {"weights": sum(tensor.double().abs().sum().item() for _, tensor in policy.weights())}]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_an_optimizer_that_was_reset_steps_like_a_new_one(model_dir: ModelDir, tmp_path: Path, state_dtype: Any):
    optimizer = replace(STEADY, state_dtype=state_dtype)
    policy = new_policy(model_dir(), optimizer=optimizer)
    train(policy, 0, 1)
    policy.save(tmp_path)
    policy.reset_optimizer()
    fresh = new_policy(tmp_path, optimizer=optimizer)
    assert (policy.weight_version, fresh.weight_version) == ("2", "0")
    assert first_step(policy) == first_step(fresh)


def test_a_checkpoint_without_moments_starts_new_ones_at_its_step(
    model_dir: ModelDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    falling = replace(STEADY, schedule="linear", decay_steps=4)
    policy = new_policy(model_dir(), optimizer=falling, saves_moments=False)
    train(policy, 0)
    policy.save(tmp_path)
    assert "trainer/optimizer.safetensors" not in contents(tmp_path)
    resumed = new_policy(model_dir(), optimizer=falling)
    train(resumed, 5)
    with caplog.at_level(logging.WARNING, logger="slimectl"):
        resumed.load(tmp_path)
    assert "saved without the optimizer's moments (train.no_save_optim), which start at zero" in caplog.text
    policy.reset_optimizer()
    expected = first_step(policy)
    assert expected[0]["lr"] == pytest.approx(1e-3 * 3 / 4)
    assert first_step(resumed) == expected


def test_moments_are_left_out_at_a_resume(model_dir: ModelDir, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    policy = new_policy(model_dir(), optimizer=STEADY)
    train(policy, 0, 1)
    policy.save(tmp_path)
    resumed = new_policy(model_dir(), optimizer=STEADY, loads_moments=False)
    with caplog.at_level(logging.WARNING, logger="slimectl"):
        resumed.load(tmp_path)
    assert "the optimizer's moments start at zero (train.no_load_optim)" in caplog.text
    assert resumed.weight_version == "2"
    policy.reset_optimizer()
    assert first_step(resumed) == first_step(policy)


def test_moments_of_another_optimizer_are_refused_unless_new_ones_are_wanted(model_dir: ModelDir, tmp_path: Path):
    new_policy(model_dir(), optimizer=STEADY).save(tmp_path)
    muon = replace(STEADY, name="muon")
    with pytest.raises(CheckpointError, match=r"saved with train\.optimizer = 'adamw'.*-s train\.no_load_optim=true$"):
        new_policy(model_dir(), optimizer=muon).load(tmp_path)
    new_policy(model_dir(), optimizer=muon, loads_moments=False).load(tmp_path)
    # slimectl 0.2 wrote neither name nor has_moments.
    file = tmp_path / "trainer" / "trainer.json"
    state = json.loads(file.read_text())
    del state["has_moments"], state["optimizer"]["name"]
    file.write_text(json.dumps(state))
    new_policy(model_dir(), optimizer=STEADY).load(tmp_path)
