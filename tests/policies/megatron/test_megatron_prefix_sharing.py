"""Rows that begin with the same tokens compute them once on Megatron-core too, at any layout that can share them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MODELS
from policies.policy_cases import Clipped, WeightedNegativeLogProb
from policies.routing_cases import computed_once, routed
from policies.trie_cases import assert_same_step, calm_model, counted_tokens, forked_rows, padded, unique_tokens
from rank_cases import Ranks, megatron
from torch import Tensor

from slimectl.algorithms import packing
from slimectl.architectures.parallel import ParallelLayout
from slimectl.policies.megatron.policy import MegatronActorCritic
from slimectl.policies.optimizer import OptimizerOptions

STILL = OptimizerOptions(lr=0.0, weight_decay=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(kind: str = "dense") -> Path:
        if kind not in made:
            layers = len(MODELS[kind].get("layer_types", "12"))
            made[kind] = calm_model(tmp_path_factory.mktemp("calm"), **MODELS[kind], num_hidden_layers=layers)
        return made[kind]

    return make


def trainer(path: Path, **options: Any) -> Any:
    return megatron(path, optimizer=STILL, **({"max_tokens_per_pack": 10_000} | options))


def gradients(policy: Any) -> dict[str, Tensor]:
    [chunk] = policy.chunks
    found = {name: p.main_grad.clone() for name, p in chunk.named_parameters() if p.requires_grad}
    policy.optim_step()
    return found


@pytest.mark.parametrize("kind", ["dense", "tied", "experts", "latent", "windows", "sinks"])
def test_any_forks_give_the_loss_and_the_gradient_of_rows_alone(folder: Callable[..., Path], kind: str):
    shared, alone = (trainer(folder(kind), share_prefixes=share) for share in (True, False))
    for seed, loss in ((0, Clipped()), (1, WeightedNegativeLogProb(needs_entropy=True))):
        assert_same_step(shared, alone, forked_rows(seed), loss, gradients)


def test_values_before_shared_tokens_are_those_of_rows_alone(folder: Callable[..., Path]):
    sharing, plain = (trainer(folder(), kind=MegatronActorCritic, share_prefixes=share) for share in (True, False))
    for each in (sharing, plain):
        each.last.value_head.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    assert_same_step(sharing, plain, forked_rows(2), Clipped(), gradients)


def test_a_forward_pass_computes_every_prefix_once(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packing, "LEAST_SAVING", 0)
    rows, shared = forked_rows(3), trainer(folder())
    with counted_tokens(shared.chunks[0].module.embedding) as counts:
        shared.forward_backward(rows, Clipped())
    assert counts == [padded(unique_tokens(rows), shared.row_multiple)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout(context=2)])
def test_layouts_share_prefixes_and_change_nothing(two: Ranks, folder: Callable[..., Path], layout: ParallelLayout):
    rows, alone = forked_rows(4), trainer(folder(), share_prefixes=False)
    two.build(folder(), layout=layout, optimizer=STILL)
    for log_probs, expected in zip(two.log_probs(rows), alone.log_probs(rows), strict=True):
        assert log_probs == pytest.approx(expected, abs=6e-6)
    steps = [each.forward_backward(rows, Clipped()) | each.optim_step() for each in (two, alone)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-6, abs=1e-7)  # the terms of a loss near zero are near one


def test_what_cannot_be_shared_is_computed_alone(folder: Callable[..., Path]):
    rows = forked_rows(5)
    for kind, options in (
        ("delta", {}),
        ("experts", {"args": {"moe_z_loss_coeff": 1e-3}}),
    ):
        each = trainer(folder(kind), **options)
        with counted_tokens(each.chunks[0].module.embedding) as counts:
            each.log_probs(rows)
        assert each.prefix_obstacle
        assert counts == [padded(sum(row.input_length for row in rows), each.row_multiple)]


def test_rows_share_tokens_that_the_engine_routed_alike(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packing, "LEAST_SAVING", 0)
    rows = routed(forked_rows(6), layers=2, experts=4, by_prefix=True)
    shared, alone = (
        trainer(folder("experts"), rollout_routing_replay=True, share_prefixes=share) for share in (True, False)
    )
    with counted_tokens(shared.chunks[0].module.embedding) as counts:
        shared.log_probs(rows)
    assert unique_tokens(rows) < sum(counts) == computed_once(rows) < sum(row.input_length for row in rows)
    assert_same_step(shared, alone, rows, Clipped(), gradients)


def test_rows_share_tokens_whose_recorded_routing_is_that_of_one_computed_token(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(packing, "LEAST_SAVING", 0)
    rows = list({tuple(row.tokens): row for row in forked_rows(7)}.values())
    policy = trainer(folder("experts"), routing_replay=True)
    halves = rows[:6], rows[6:]
    for half in halves:
        policy.log_probs(half)
    with counted_tokens(policy.chunks[0].module.embedding) as counts:
        policy.forward_backward(halves[0], Clipped())
        policy.forward_backward(rows, Clipped())
    # Two passes computed a prefix of rows in both halves twice, and may have routed it in two ways.
    assert counts == [unique_tokens(halves[0]), sum(map(unique_tokens, halves))]
    assert unique_tokens(rows) < counts[1]
