"""A policy that is its own critic, on Megatron-core: as the FSDP one at any layout; each reads the other's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import random_rows
from rank_cases import STEADY, Ranks, megatron

from slimectl.algorithms.losses import PolicyLoss
from slimectl.algorithms.value_loss import PolicyAndValueLoss, ValueLoss
from slimectl.architectures.parallel import ParallelLayout
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.policies.fsdp.policy import FsdpActorCritic
from slimectl.policies.megatron.policy import MegatronActorCritic
from slimectl.policies.options import TrainerOptions
from slimectl.types import TrainingSample

ModelDir = Callable[..., Path]
Learnt = tuple[Path, Any, dict[str, float]]
LOSS = PolicyAndValueLoss(PolicyLoss(), ValueLoss(value_clip=10.0), 0.5)
LAYOUTS = [ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout(context=2), ParallelLayout()]


def rows_with_returns() -> list[TrainingSample]:
    rows = random_rows(groups=4)
    for row in rows:
        row.values, row.returns = [0.0] * row.response_length, row.advantages
    return rows


def step(policy: Any) -> dict[str, float]:
    made: dict[str, float] = policy.forward_backward(rows_with_returns(), LOSS) | policy.optim_step()
    return made


@pytest.fixture(scope="module")
def learnt(four_layers: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    """A checkpoint of the FSDP policy after a step, the policy itself after another one, and what that told."""
    fsdp = FsdpActorCritic(four_layers(), HFCheckpoint(), TrainerOptions(optimizer=STEADY))
    step(fsdp)
    folder = tmp_path_factory.mktemp("shared")
    fsdp.save(folder)
    return folder, fsdp, step(fsdp)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_goes_on_where_the_fsdp_policy_stood(two: Ranks, learnt: Learnt, layout: ParallelLayout):
    folder, fsdp, told = learnt
    two.build(folder, kind=MegatronActorCritic, layout=layout)
    two.load(folder)
    assert step(two) == pytest.approx(told, rel=1e-4, abs=1e-6)
    rows = rows_with_returns()
    for found, expected in zip(two.values(rows), fsdp.values(rows), strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    for found, expected in zip(two.log_probs(rows), fsdp.log_probs(rows), strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    assert [name for name, _ in two.weights()] == [name for name, _ in fsdp.weights()]


def test_the_fsdp_policy_goes_on_where_it_stood(four_layers: ModelDir, tmp_path: Path):
    alone = megatron(four_layers("tied"), kind=MegatronActorCritic)
    assert {value for values in alone.values(random_rows()) for value in values} == {0.0}
    step(alone)
    alone.save(tmp_path)
    fsdp = FsdpActorCritic(tmp_path, HFCheckpoint(), TrainerOptions(optimizer=STEADY))
    fsdp.load(tmp_path)
    assert step(fsdp) == pytest.approx(step(alone), rel=1e-4, abs=1e-6)
    for (name, tensor), (other, expected) in zip(fsdp.weights(), alone.weights(), strict=True):
        assert name == other
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)
