"""What every policy promises to training (protocols.Policy), in one process and over several."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from slimectl.algorithms.losses import PolicyLoss, SftLoss
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import CheckpointError
from slimectl.executors.local import LocalExecutor
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.megatron.policy import MegatronPolicy
from slimectl.policies.metrics import merge_metrics
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.rank_group import DistributedPolicy
from slimectl.protocols import Policy
from slimectl.types import TrainingSample

ModelDir = Callable[..., Path]
OPTIONS = OptimizerOptions(lr=4e-3, schedule="linear", warmup_steps=2, decay_steps=6, min_lr=0.0)


def alone(folder: Path) -> Policy:
    return FsdpPolicy(folder, HFCheckpoint(), TrainerOptions(optimizer=OPTIONS, max_tokens_per_pack=48))


def over_two_ranks(folder: Path) -> Policy:
    return DistributedPolicy(LocalExecutor(), partial(alone, folder), ranks=2)


def megatron(folder: Path) -> Policy:
    return MegatronPolicy(folder, HFCheckpoint(), TrainerOptions(optimizer=OPTIONS, max_tokens_per_pack=48))


ADAPTERS: dict[str, Callable[[Path], Policy]] = {"fsdp": alone, "group": over_two_ranks, "megatron": megatron}
NAMES = [pytest.param(name, marks=pytest.mark.slow if name == "group" else ()) for name in ADAPTERS]


@pytest.fixture(scope="module", params=NAMES)
def made(request: pytest.FixtureRequest, model_dir: ModelDir) -> Iterator[Policy]:
    policy = ADAPTERS[request.param](model_dir("qwen3"))
    yield policy
    policy.close()


@pytest.fixture(scope="module")
def untrained(made: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untrained")
    made.save(folder)
    return folder


@pytest.fixture
def policy(made: Policy, untrained: Path) -> Policy:
    """As it was when it was made."""
    made.load(untrained)
    return made


def rows(*, seed: int = 0) -> list[TrainingSample]:
    """Three answers to each of four prompts, of 1 to 11 tokens, half of them bad."""
    draw = random.Random(seed)
    made = []
    for group in range(4):
        prompt = [draw.randrange(256) for _ in range(4 + 3 * group)]
        for sibling in range(3):
            length = draw.randint(1, 11)
            made.append(
                TrainingSample(
                    tokens=prompt + [draw.randrange(256) for _ in range(length)],
                    response_length=length,
                    loss_weights=[1 / (12 * length)] * length,
                    advantages=[1.0 if sibling else -1.0] * length,
                    group=group,
                )
            )
    return made


def snapshot(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def trained(policy: Policy, steps: range) -> list[dict[str, float]]:
    return [policy.forward_backward(rows(seed=step), PolicyLoss()) | policy.optim_step() for step in steps]


def test_one_log_probability_for_every_response_token_in_the_order_of_the_rows(policy: Policy):
    found = policy.log_probs(rows())
    assert [len(values) for values in found] == [row.response_length for row in rows()]
    assert all(value < 0 for values in found for value in values)
    for values, backwards in zip(found, reversed(policy.log_probs(rows()[::-1])), strict=True):
        assert values == pytest.approx(backwards, abs=1e-5)


def test_the_loss_is_the_sum_of_weight_times_token_loss(policy: Policy):
    log_probs = policy.log_probs(rows())
    by_hand = -sum(
        w * p for row, ps in zip(rows(), log_probs, strict=True) for w, p in zip(row.loss_weights, ps, strict=True)
    )
    assert policy.forward_backward(rows(), SftLoss())["loss"] == pytest.approx(by_hand, rel=1e-5)


def test_two_halves_make_the_whole_in_metrics_and_in_gradient(policy: Policy, untrained: Path):
    whole = policy.forward_backward(rows(), PolicyLoss())
    step = policy.optim_step()
    policy.load(untrained)
    halves = [policy.forward_backward(half, PolicyLoss()) for half in (rows()[:5], rows()[5:])]
    assert set(whole) >= {"loss", "pg_loss", "ois"}
    assert whole["ois"] == pytest.approx(1.0, rel=1e-5)  # the weights sum to one
    assert merge_metrics(halves) == pytest.approx(whole, rel=1e-5, abs=1e-7)
    assert policy.optim_step() == pytest.approx(step, rel=1e-5)


def test_a_step_reports_its_gradient_and_its_learning_rate_and_leaves_no_gradient(policy: Policy):
    steps = trained(policy, range(3))
    assert [step["lr"] for step in steps] == pytest.approx([0.0, 2e-3, 4e-3])  # up in two steps, then down
    assert all(step["grad_norm"] > 0 for step in steps)
    assert policy.optim_step() == pytest.approx({"grad_norm": 0.0, "lr": 3e-3})


def test_a_step_without_a_gradient_changes_no_weight(policy: Policy):
    trained(policy, range(3))
    before = snapshot(policy)
    silent = [dataclasses.replace(row, loss_weights=[0.0] * len(row.loss_weights)) for row in rows()]
    policy.forward_backward(silent, PolicyLoss())
    assert policy.optim_step()["grad_norm"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())


def test_the_version_counts_steps_and_nothing_else(policy: Policy, tmp_path: Path):
    assert policy.weight_version == "0"
    policy.log_probs(rows())
    policy.forward_backward(rows(), PolicyLoss())
    snapshot(policy)
    assert policy.weight_version == "0"
    policy.optim_step()
    assert policy.weight_version == "1"
    policy.save(tmp_path)
    trained(policy, range(2))
    assert policy.weight_version == "3"
    policy.load(tmp_path)
    assert policy.weight_version == "1"


def test_weights_are_those_of_the_checkpoint_whole_and_each_once(policy: Policy, model_dir: ModelDir):
    found = list(policy.weights())
    expected = dict(HFCheckpoint().read(model_dir("qwen3")))
    assert [name for name, _ in found] == list(expected)
    for name, tensor in found:
        assert torch.equal(tensor, expected[name]), name


def test_learning_makes_good_answers_likelier_than_bad_ones(policy: Policy):
    def margin() -> float:
        values = [sum(values) * row.advantages[0] for values, row in zip(policy.log_probs(rows()), rows(), strict=True)]
        return sum(values)

    before = margin()
    for _ in range(4):
        policy.forward_backward(rows(), PolicyLoss())
        policy.optim_step()
    assert margin() > before + 1


def test_what_was_saved_goes_on_to_the_last_digit(policy: Policy, tmp_path: Path):
    trained(policy, range(2))
    policy.save(tmp_path)
    saved, reports = snapshot(policy), trained(policy, range(2, 4))
    after = snapshot(policy)
    policy.load(tmp_path)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in policy.weights())
    assert trained(policy, range(2, 4)) == reports
    assert all(torch.equal(tensor, after[name]) for name, tensor in policy.weights())
    assert not torch.equal(saved["model.norm.weight"], after["model.norm.weight"])


def test_what_was_saved_is_a_checkpoint_for_others(policy: Policy, tmp_path: Path):
    trained(policy, range(1))
    policy.save(tmp_path)
    on_disk = dict(HFCheckpoint().read(tmp_path))
    assert all(torch.equal(tensor, on_disk.pop(name)) for name, tensor in policy.weights())
    assert on_disk == {}
    assert (tmp_path / "config.json").exists()
    assert (tmp_path / "tokenizer.json").exists()


def test_loading_drops_a_gradient_that_was_not_stepped(policy: Policy, untrained: Path):
    policy.forward_backward(rows(), PolicyLoss())
    policy.load(untrained)
    assert policy.optim_step()["grad_norm"] == 0.0


def test_a_folder_that_no_policy_wrote_is_refused(policy: Policy, model_dir: ModelDir):
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        policy.load(model_dir("qwen3"))
    assert len(policy.log_probs(rows())) == 12


def test_a_policy_that_does_not_train_has_the_same_log_probs_and_nothing_to_update(model_dir: ModelDir):
    fsdp = FsdpPolicy(model_dir("qwen3"), HFCheckpoint(), TrainerOptions(optimizer=OPTIONS, trains=False))
    megatron = MegatronPolicy(model_dir("qwen3"), HFCheckpoint(), TrainerOptions(optimizer=OPTIONS, trains=False))
    for frozen, trained in ((fsdp, alone), (megatron, ADAPTERS["megatron"])):
        expected = trained(model_dir("qwen3")).log_probs(rows())
        for found, wanted in zip(frozen.log_probs(rows()), expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)
    assert not fsdp.masters.trained
    assert not megatron.updated
    assert (
        sum(buffer.numel() for chunk in megatron.chunks for buffer in chunk.parameters() if buffer.requires_grad) == 0
    )
