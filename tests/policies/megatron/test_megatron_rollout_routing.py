"""Trainers route tokens to the experts that the engine chose (arXiv:2510.11370), however a step is divided."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import Clipped, flat_log_probs, new_policy, random_rows
from policies.routing_cases import routed
from rank_cases import Ranks, megatron

from slimectl.architectures.parallel import ParallelLayout
from slimectl.errors import RecordError
from slimectl.policies.recompute import Recompute
from slimectl.types import TrainingSample

ModelDir = Callable[..., Path]
REPLAYING: dict[str, Any] = {"rollout_routing_replay": True}
FULL = Recompute("full")


def experts_rows() -> list[TrainingSample]:
    return routed(random_rows(groups=4), layers=4, experts=4)


def step(policy: Any, rows: list[TrainingSample]) -> list[float]:
    """Loss, ratio and gradient norm of a step in two calls; the clipped loss hangs on every log-probability."""
    sums = [policy.forward_backward(part, Clipped()) for part in (rows[:7], rows[7:])]
    return [value for part in sums for value in part.values()] + [policy.optim_step()["grad_norm"]]


@pytest.fixture(scope="module")
def expected(four_layers: ModelDir) -> list[float]:
    """The step of a Hugging Face model in one process, whose own test compares it with routing by hand."""
    return step(new_policy(four_layers("experts"), **REPLAYING), experts_rows())


def test_megatron_replays_as_the_hugging_face_model_does(four_layers: ModelDir, expected: list[float]):
    rows = experts_rows()
    found, reference = megatron(four_layers("experts"), **REPLAYING), new_policy(four_layers("experts"), **REPLAYING)
    log_probs = flat_log_probs(found, rows)
    torch.testing.assert_close(log_probs, flat_log_probs(reference, rows), atol=2e-5, rtol=0)
    free = flat_log_probs(megatron(four_layers("experts")), rows)
    assert (free - log_probs).abs().max() > 0.05
    assert step(found, rows) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens_per_pack": 25, "recompute": FULL},
        {"recompute": Recompute("selective", ("moe",)), "max_tokens_per_pack": 500},
    ],
    ids=str,
)
def test_packing_and_recomputation_change_nothing(
    four_layers: ModelDir, expected: list[float], options: dict[str, Any]
):
    policy = megatron(four_layers("experts"), **REPLAYING, **options)
    assert step(policy, experts_rows()) == pytest.approx(expected, rel=1e-4)


LAYOUTS = [
    (ParallelLayout(tensor=2, expert=2), Recompute()),
    (ParallelLayout(expert=2), FULL),
    (ParallelLayout(context=2), FULL),
    (ParallelLayout(pipeline=2), Recompute()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "recompute"), LAYOUTS, ids=str)
def test_two_ranks_have_loss_and_gradient_of_one(
    two: Ranks, four_layers: ModelDir, expected: list[float], layout: ParallelLayout, recompute: Recompute
):
    two.build(four_layers("experts"), layout=layout, recompute=recompute, **REPLAYING)
    assert step(two, experts_rows()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_two_ranks_of_the_hugging_face_model_have_them_too(two: Ranks, four_layers: ModelDir, expected: list[float]):
    two.hold(partial(new_policy, four_layers("experts"), recompute=FULL, max_tokens_per_pack=60, **REPLAYING))
    assert step(two, experts_rows()) == pytest.approx(expected, rel=1e-4)


def test_the_first_layers_of_a_model_may_be_dense(four_layers: ModelDir):
    """DeepSeek's first layer has no router, and its part of the record is not read."""
    rows = routed(random_rows(groups=2), layers=4, experts=4)
    policies = [make(four_layers("latent"), **REPLAYING) for make in (megatron, new_policy)]
    found, reference = [flat_log_probs(policy, rows) for policy in policies]
    torch.testing.assert_close(found, reference, atol=2e-5, rtol=0)


def test_a_row_of_another_model_is_refused(four_layers: ModelDir):
    rows = routed(random_rows(groups=1), layers=3, experts=4)
    with pytest.raises(RecordError, match="It comes from another model"):
        megatron(four_layers("experts"), **REPLAYING).forward_backward(rows, Clipped())
