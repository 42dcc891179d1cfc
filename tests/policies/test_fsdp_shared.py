"""A policy that is its own critic: both halves are what they would be alone, and one step moves them together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import add_value_head, padded_log_probs, random_rows, rows_with_returns
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slimectl.algorithms.losses import PolicyLoss
from slimectl.algorithms.value_loss import PolicyAndValueLoss, ValueLoss
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import CheckpointError
from slimectl.executors.local import LocalExecutor
from slimectl.policies.fsdp.policy import FsdpActorCritic, FsdpCritic, FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.rank_group import DistributedPolicy

ModelDir = Callable[..., Path]
LOSS = PolicyAndValueLoss(PolicyLoss(), ValueLoss(value_clip=10.0), 0.5)


def new(folder: Path, kind: Callable[..., Any] = FsdpActorCritic, **options: Any) -> Any:
    return kind(folder, HFCheckpoint(), TrainerOptions(**({"optimizer": OptimizerOptions(lr=3e-3)} | options)))


@pytest.fixture(scope="module", params=["llama", "llama_untied"])
def with_head(request: pytest.FixtureRequest, model_dir: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_value_head(model_dir(request.param), tmp_path_factory.mktemp("shared"))


def test_both_halves_say_what_they_would_alone_and_engines_get_the_policy(with_head: Path):
    rows, both = random_rows(), new(with_head)
    assert both.log_probs(rows) == new(with_head / "plain", FsdpPolicy).log_probs(rows)
    assert both.values(rows) == new(with_head, FsdpCritic).values(rows)
    assert "score.weight" not in dict(both.weights())
    assert len(dict(both.weights())) == len(load_file(with_head / "model.safetensors")) - 1


def test_one_gradient_is_that_of_both_losses(with_head: Path):
    rows = rows_with_returns()
    both = new(with_head)
    metrics = both.forward_backward(rows, LOSS)
    model = AutoModelForCausalLM.from_pretrained(with_head, dtype=torch.float32)
    head = load_file(with_head / "model.safetensors")["score.weight"].requires_grad_()
    policy_loss = value_loss = torch.zeros(())
    for row, logprobs_R in zip(rows, padded_log_probs(model, rows), strict=True):
        ratio_R = (logprobs_R - torch.tensor(row.old_log_probs)).exp()
        advantages_R = torch.tensor(row.advantages)
        surrogate_R = torch.maximum(-ratio_R * advantages_R, -ratio_R.clamp(0.8, 1.2) * advantages_R)
        hidden_TH = model.model(torch.tensor([row.tokens])).last_hidden_state[0]
        values_R = (hidden_TH @ head.T)[row.prompt_length - 1 : -1, 0]
        policy_loss = policy_loss + 0.02 * surrogate_R.sum()
        value_loss = value_loss + 0.02 * (values_R - torch.tensor(row.returns)).square().sum()
    (policy_loss + 0.5 * value_loss).backward()
    parts = [p.grad for p in [*model.parameters(), head] if p.grad is not None]
    assert metrics["loss"] == pytest.approx((policy_loss + 0.5 * value_loss).item(), rel=1e-4)
    assert metrics["critic-loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    both = new(with_head)
    both.forward_backward(rows, LOSS)
    assert both.optim_step()["grad_norm"] == pytest.approx(
        torch.stack([p.norm() for p in parts]).norm().item(), rel=1e-4
    )


def test_it_goes_on_from_its_checkpoint_which_others_can_load(with_head: Path, tmp_path: Path):
    rows, both = rows_with_returns(), new(with_head)
    for _ in range(2):
        both.forward_backward(rows, LOSS)
        both.optim_step()
    both.save(tmp_path)
    resumed = new(tmp_path)
    resumed.load(tmp_path)
    assert resumed.values(rows) == both.values(rows)
    assert resumed.forward_backward(rows, LOSS) == both.forward_backward(rows, LOSS)
    assert resumed.optim_step() == both.optim_step()
    assert resumed.values(rows) == both.values(rows)
    assert "score.weight" not in load_file(tmp_path / "model.safetensors")
    alone = tmp_path / "alone"
    alone.mkdir()
    new(with_head / "plain", FsdpPolicy).save(alone)
    with pytest.raises(CheckpointError, match=r'no value_head.safetensors\. .* algorithm.critic = "separate"'):
        resumed.load(alone)


@pytest.mark.slow
def test_two_ranks_equal_one(with_head: Path):
    rows, one = rows_with_returns(), new(with_head)
    two: Any = DistributedPolicy(LocalExecutor(), partial(new, with_head), ranks=2)
    try:
        for _ in range(2):
            reports = [each.forward_backward(rows, LOSS) | each.optim_step() for each in (one, two)]
            assert reports[1] == pytest.approx(reports[0], rel=1e-5)
        for alone, ranked in zip(one.values(rows), two.values(rows), strict=True):
            assert ranked == pytest.approx(alone, abs=1e-5)
    finally:
        two.close()
