"""Routing is replayed as it was recorded; load balancing weighs the same however a step is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from policies.policy_cases import Clipped, WeightedNegativeLogProb, random_rows
from rank_cases import Ranks, megatron

from slimectl.architectures.parallel import ParallelLayout
from slimectl.policies.megatron.policy import MegatronPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.recompute import Recompute

ModelDir = Callable[..., Path]
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
DRIFTING = OptimizerOptions(lr=0.03, eps=1e-3)
"""A step after which many tokens would go to other experts."""


def routers(policy: MegatronPolicy) -> list[TopKRouter]:
    return [module for chunk in policy.chunks for module in chunk.modules() if isinstance(module, TopKRouter)]


def routings(policy: MegatronPolicy) -> list[torch.Tensor]:
    """Filled with every routing map [tokens, experts] from now on."""
    seen: list[torch.Tensor] = []
    for router in routers(policy):
        router.register_forward_hook(lambda module, inputs, output: seen.append(output[1].clone()))
    return seen


def drifted(four_layers: ModelDir, rows: list[Any], **options: Any) -> MegatronPolicy:
    """A policy that moved on after its old log-probabilities of `rows` were taken."""
    policy = megatron(four_layers("experts"), optimizer=DRIFTING, **options)
    policy.log_probs(rows)
    policy.forward_backward(random_rows(seed=9), WeightedNegativeLogProb())
    policy.optim_step()
    return policy


def test_replay_keeps_the_recorded_experts_after_the_router_has_moved(four_layers: ModelDir):
    rows = random_rows()
    options = {"max_tokens_per_pack": 500, "share_prefixes": False}  # all read the same tokens
    kept, free = [drifted(four_layers, rows, routing_replay=on, **options) for on in (True, False)]
    original = megatron(four_layers("experts"), **options)
    maps = [routings(policy) for policy in (original, kept, free)]
    for policy in (original, kept, free):
        policy.forward_backward(rows, Clipped())
    agreement = [
        sum((a == b).all(dim=1).float().mean().item() for a, b in zip(maps[0], other, strict=True)) / len(maps[0])
        for other in maps[1:]
    ]
    assert agreement[0] == 1.0
    assert agreement[1] < 0.9


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens_per_pack": 25},
        {"share_prefixes": False},
        {"recompute": Recompute("full")},
        {"recompute": Recompute("selective", ("moe",)), "max_tokens_per_pack": 25},
    ],
    ids=str,
)
def test_replay_does_not_depend_on_packing_and_recomputation(four_layers: ModelDir, options: dict[str, Any]):
    rows = random_rows(groups=4)
    expected = drifted(four_layers, rows, routing_replay=True, max_tokens_per_pack=500)
    found = drifted(four_layers, rows, routing_replay=True, **options)
    chosen = rows[::-2]
    assert found.forward_backward(chosen, Clipped()) == pytest.approx(
        expected.forward_backward(chosen, Clipped()), rel=1e-5
    )
    assert found.optim_step()["grad_norm"] == pytest.approx(expected.optim_step()["grad_norm"], rel=1e-5)


def test_replay_equals_routing_freely_where_nothing_has_moved(four_layers: ModelDir):
    rows = random_rows()
    free, replaying = [megatron(four_layers("experts"), routing_replay=on) for on in (False, True)]
    replaying.log_probs(rows[:4])
    assert replaying.forward_backward(rows, Clipped()) == pytest.approx(free.forward_backward(rows, Clipped()))


LAYOUTS = [
    ParallelLayout(tensor=2, expert=2),
    ParallelLayout(context=2),
    ParallelLayout(pipeline=2),
    ParallelLayout(),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_ranks_replay_what_one_would(two: Ranks, four_layers: ModelDir, layout: ParallelLayout):
    rows = random_rows(groups=4)
    expected = drifted(four_layers, rows, routing_replay=True)
    two.build(four_layers("experts"), optimizer=DRIFTING, routing_replay=True, layout=layout)
    two.log_probs(rows)
    two.forward_backward(random_rows(seed=9), WeightedNegativeLogProb())
    two.optim_step()
    for chosen in (rows[:7], rows[7:]):
        wanted = expected.forward_backward(chosen, Clipped())
        assert two.forward_backward(chosen, Clipped()) == pytest.approx(wanted, rel=1e-5)
    assert two.optim_step()["grad_norm"] == pytest.approx(expected.optim_step()["grad_norm"], rel=1e-5)


class Balanced:
    """A loss with the load-balancing loss of Fedus et al. 2021 (arXiv:2101.03961, eq. 4) added by hand."""

    needs_entropy = False

    def __init__(self, policy: MegatronPolicy, coefficient: float) -> None:
        self.coefficient = coefficient
        self.logits: list[torch.Tensor] = []
        for router in routers(policy):
            router.register_forward_pre_hook(lambda module, inputs: self.logits.append(module.gating(inputs[0])[:, 0]))

    def __call__(self, pack: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value, metrics = WeightedNegativeLogProb()(pack)
        for logits_NE in self.logits:
            probs_NE = torch.softmax(logits_NE, dim=-1)
            chosen_E = torch.zeros_like(probs_NE).scatter_(1, probs_NE.topk(2).indices, 1.0).mean(0)
            value = value + self.coefficient * 4 / 2 * (chosen_E * probs_NE.mean(0)).sum()
        return value, metrics


def test_the_balancing_loss_weighs_as_much_as_the_rows(four_layers: ModelDir):
    rows = random_rows(groups=4)
    weights = sum(sum(row.loss_weights) for row in rows)
    # A loss that balances experts counts every token of every row: the policy that has it shares none.
    plain = megatron(four_layers("experts"), max_tokens_per_pack=500, share_prefixes=False)
    plain.forward_backward(rows, Balanced(plain, 0.1 * weights))
    expected = plain.optim_step()["grad_norm"]
    policy = megatron(four_layers("experts"), max_tokens_per_pack=500, args=BALANCED)
    policy.forward_backward(rows, WeightedNegativeLogProb())
    assert policy.optim_step()["grad_norm"] == pytest.approx(expected, rel=1e-5)
    unbalanced = megatron(four_layers("experts"), max_tokens_per_pack=500)
    unbalanced.forward_backward(rows, WeightedNegativeLogProb())
    assert unbalanced.optim_step()["grad_norm"] != pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_balancing_loss_is_that_of_one_process(two: Ranks, four_layers: ModelDir, layout: ParallelLayout):
    """Packs of one row each: both then balance over the same tokens."""
    rows = random_rows(groups=2, answers=2)
    options = {"max_tokens_per_pack": 2, "args": BALANCED}
    one = megatron(four_layers("experts"), **options)
    two.build(four_layers("experts"), layout=layout, **options)
    for policy in (one, two):
        policy.forward_backward(rows, WeightedNegativeLogProb())
    assert two.optim_step()["grad_norm"] == pytest.approx(one.optim_step()["grad_norm"], rel=1e-5)


def biases(policy: Any) -> torch.Tensor:
    return torch.stack([tensor for name, tensor in policy.weights() if name.endswith("e_score_correction_bias")])


@pytest.mark.slow
def test_the_routers_biases_move_against_the_load_as_in_one_process_and_are_saved(
    two: Ranks, four_layers: ModelDir, tmp_path: Path
):
    """Wang et al. 2024, arXiv:2408.15664: each by the rate, up where an expert has less than its share of tokens."""
    options = {"args": {"moe_router_bias_update_rate": 0.5}, "freeze": ["self_attn"]}
    rows = random_rows(groups=4)[:-1]
    one = megatron(four_layers("latent"), **options)
    maps = routings(one)
    one.log_probs(rows)
    assert biases(one).tolist() == [[0.0] * 4] * 3
    maps.clear()
    one.forward_backward(rows, WeightedNegativeLogProb())
    load = [torch.cat(maps[layer::3]).sum(0) for layer in range(3)]
    one.optim_step()
    expected = torch.stack([torch.sign(counts.float().mean() - counts) * 0.5 for counts in load])
    assert biases(one).tolist() == expected.tolist()
    one.save(tmp_path)
    for layout in (ParallelLayout(tensor=2, expert=2), ParallelLayout(context=2), ParallelLayout()):
        two.build(four_layers("latent"), layout=layout, **options)
        two.forward_backward(rows, WeightedNegativeLogProb())
        two.optim_step()
        assert biases(two).tolist() == expected.tolist()
    two.build(four_layers("latent"), **options)
    two.load(tmp_path)
    assert biases(two).tolist() == expected.tolist()
