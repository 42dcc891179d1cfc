"""However many ranks and however cut: the losses, gradients and weights of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import Clipped, WeightedNegativeLogProb, new_policy, random_rows
from rank_cases import STEADY, Ranks, megatron

from slimectl.architectures.parallel import ParallelLayout

ModelDir = Callable[..., Path]
Reports = list[dict[str, float]]
Outcome = tuple[Reports, dict[str, torch.Tensor]]
ENTROPY = WeightedNegativeLogProb(needs_entropy=True)

TWO: list[tuple[str, dict[str, Any]]] = [
    ("dense", {"layout": ParallelLayout(tensor=2)}),
    ("tied", {"layout": ParallelLayout(tensor=2), "distributed_optimizer": False}),
    ("dense", {"layout": ParallelLayout(pipeline=2, virtual_pipeline=2)}),
    ("dense", {}),
    ("dense", {"layout": ParallelLayout(context=2)}),
    ("delta", {"layout": ParallelLayout(context=2)}),
    ("experts", {"layout": ParallelLayout(expert=2)}),
    ("experts", {"layout": ParallelLayout(tensor=2, expert_tensor=2)}),
    ("latent", {"layout": ParallelLayout(tensor=2, expert=2)}),
    ("sinks", {"layout": ParallelLayout(tensor=2, expert=2)}),
]
FOUR: list[tuple[str, dict[str, Any]]] = [
    ("tied", {"layout": ParallelLayout(tensor=2, pipeline=2)}),
    ("dense", {"layout": ParallelLayout(tensor=2, context=2)}),
    ("tied", {"layout": ParallelLayout(pipeline=2, virtual_pipeline=2)}),
    ("dense", {"layout": ParallelLayout(pipeline=2, context=2), "distributed_optimizer": False}),
    ("delta", {"layout": ParallelLayout(pipeline=2, context=2)}),
    ("experts", {"layout": ParallelLayout(tensor=2, expert=2)}),
    ("experts", {"layout": ParallelLayout(tensor=2, pipeline=2, expert=2)}),
    ("experts", {"layout": ParallelLayout(context=2, expert=4), "distributed_optimizer": False}),
]


def two_steps(policy: Any) -> Reports:
    """What each reports; the second begins where the optimizer has state."""
    reports = []
    for seed, loss in enumerate((Clipped(), ENTROPY)):
        rows = random_rows(groups=4, seed=seed)
        for row, log_probs in zip(rows, policy.log_probs(rows), strict=True):
            row.old_log_probs = log_probs
        reports.append(policy.forward_backward(rows, loss) | policy.optim_step())
    return reports


@pytest.fixture(scope="module")
def alone(four_layers: ModelDir) -> Callable[[str], Outcome]:
    """What one process makes of a model."""
    made: dict[str, Outcome] = {}

    def outcome(kind: str) -> Outcome:
        if kind not in made:
            policy = megatron(four_layers(kind))
            made[kind] = two_steps(policy), {name: tensor.clone() for name, tensor in policy.weights()}
        return made[kind]

    return outcome


def assert_equal(policy: Any, alone: Outcome) -> None:
    # Adam's first update makes whole steps of gradients that are rounding alone, and sums of other lengths round else.
    for found, expected, rel in zip(two_steps(policy), alone[0], (1e-6, 3e-5), strict=True):
        assert found.keys() == expected.keys()
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert found == pytest.approx(expected, rel=rel)
    weights = list(policy.weights())
    assert [name for name, _ in weights] == list(alone[1])
    for name, tensor in weights:
        torch.testing.assert_close(tensor, alone[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), TWO, ids=str)
def test_two_ranks_equal_one(two: Ranks, four_layers: ModelDir, alone: Any, kind: str, options: dict[str, Any]):
    assert_equal(two.build(four_layers(kind), **options), alone(kind))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), FOUR, ids=str)
def test_four_ranks_equal_one(four: Ranks, four_layers: ModelDir, alone: Any, kind: str, options: dict[str, Any]):
    assert_equal(four.build(four_layers(kind), **options), alone(kind))


@pytest.mark.parametrize("kind", ["dense", "tied", "windows", "sinks"])
def test_the_fsdp_policy_makes_the_same_steps(four_layers: ModelDir, alone: Any, kind: str):
    policy = new_policy(four_layers(kind), optimizer=STEADY)
    reports, weights = alone(kind)
    for found, expected in zip(two_steps(policy), reports, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    for name, tensor in policy.weights():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-6)
