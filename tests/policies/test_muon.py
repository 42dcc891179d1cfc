"""Muon's step against torch's own, and by hand in float64; which parameters it updates; two ranks equal one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import Clipped, new_policy, random_rows
from safetensors.torch import load_file
from torch import Tensor

from slimectl.checkpoints.create import create_model
from slimectl.executors.local import LocalExecutor
from slimectl.policies.muon import LocalMatrices, Muon
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.rank_group import DistributedPolicy

ModelDir = Callable[..., Path]
MUON = OptimizerOptions(name="muon", lr=0.01, weight_decay=0.1)


def muon(*parameters: Tensor, options: OptimizerOptions = MUON, dtype: torch.dtype = torch.float32) -> Muon:
    group = {"params": list(parameters), "weight_decay": options.weight_decay, "matrices": True}
    return Muon([group], options, exchange=LocalMatrices(), dtype=dtype, lr=options.lr)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_torch(shape: tuple[int, int], nesterov: bool):
    ours, other = (drawn(*shape).requires_grad_() for _ in range(2))
    options = replace(MUON, muon_use_nesterov=nesterov, muon_momentum=0.9, muon_num_ns_steps=4)
    optimizers = (
        muon(ours, options=options, dtype=torch.bfloat16),
        torch.optim.Muon(
            [other], lr=0.01, weight_decay=0.1, momentum=0.9, nesterov=nesterov, ns_steps=4,
            adjust_lr_fn="match_rms_adamw",
        ),
    )  # fmt: skip
    for step in range(3):
        ours.grad, other.grad = drawn(*shape, seed=step), drawn(*shape, seed=step)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, other, rtol=0, atol=1e-6)


def slow_muon(weight: Tensor, gradients: list[Tensor]) -> Tensor:
    """MUON's steps on one matrix [M, N] in float64: momentum, look-ahead, quintic iteration, decay, scale."""
    weight, momentum = weight.double(), torch.zeros_like(weight).double()
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient.double()
        x = 0.05 * gradient.double() + 0.95 * momentum
        x = x / x.square().sum().sqrt()
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * 0.2 * math.sqrt(max(weight.shape)) * x
    return weight


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)], ids=str)
def test_steps_in_float32_are_those_of_a_loop_in_float64(shape: tuple[int, int]):
    weight, gradients = drawn(*shape).requires_grad_(), [drawn(*shape, seed=seed) for seed in range(1, 4)]
    expected, optimizer = slow_muon(weight.detach(), gradients), muon(weight)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    torch.testing.assert_close(weight.double(), expected, rtol=0, atol=1e-6)


def test_experts_are_orthogonalized_one_by_one_and_those_without_gradient_stay():
    stack, gradients = drawn(3, 6, 10).requires_grad_(), [drawn(3, 6, 10, seed=seed) for seed in range(1, 3)]
    gradients[1][2] = 0  # the last expert gets no tokens in the second step
    start, optimizer = stack.detach().clone(), muon(stack)
    for gradient in gradients:
        stack.grad = gradient.clone()
        optimizer.step()
    for i in range(2):
        expected = slow_muon(start[i], [gradient[i] for gradient in gradients])
        torch.testing.assert_close(stack[i].double(), expected, rtol=0, atol=1e-6)
    after_one = slow_muon(start[2], [gradients[0][2]])
    torch.testing.assert_close(stack[2].double(), after_one * (1 - 0.01 * 0.1), rtol=0, atol=1e-6)


EXPECTED_OTHERS = {
    "qwen3_moe": ("embed_tokens", "norm", "gate.weight", "lm_head"),
    "llama_untied": ("embed_tokens", "norm", "lm_head"),
    "qwen2": ("embed_tokens", "norm", "bias"),
}


@pytest.mark.parametrize("family", EXPECTED_OTHERS)
def test_hidden_matrices_get_muon_and_all_other_parameters_adamw(model_dir: ModelDir, family: str):
    policy = new_policy(model_dir(family), optimizer=MUON)
    others = {name for name in policy.masters.trained if any(part in name for part in EXPECTED_OTHERS[family])}
    assert policy.matrices == policy.masters.trained.keys() - others
    assert policy.matrices
    assert others
    policy.forward_backward(random_rows(), Clipped())
    policy.optim_step()
    for name, master in policy.masters.trained.items():
        assert ("exp_avg_sq" in policy.optimizer.state[master]) == (name in others), name


def train(policy: Any, steps: range) -> list[dict[str, float]]:
    reports = []
    for step in steps:
        metrics = policy.forward_backward(random_rows(seed=step), Clipped())
        reports.append(metrics | policy.optim_step())
    return reports


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_a_checkpoint_with_one_moment_for_matrices_continues_to_the_last_digit(
    model_dir: ModelDir, tmp_path: Path, state_dtype: Any
):
    optimizer = replace(MUON, state_dtype=state_dtype)
    whole = new_policy(model_dir("qwen3_moe"), optimizer=optimizer)
    train(whole, range(2))
    whole.save(tmp_path)
    moments = load_file(tmp_path / "trainer" / "optimizer.safetensors")
    expert = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert f"exp_avg.{expert}" in moments
    assert f"exp_avg_sq.{expert}" not in moments
    assert "exp_avg_sq.model.embed_tokens.weight" in moments
    resumed = new_policy(model_dir("qwen3_moe"), optimizer=optimizer)
    resumed.load(tmp_path)
    assert train(resumed, range(2, 4)) == train(whole, range(2, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "experts"), [("qwen3_moe", 4), ("qwen3_moe", 3), ("llama_untied", None)])
def test_two_ranks_give_the_steps_of_one(model_dir: ModelDir, tmp_path: Path, family: str, experts: int | None):
    """Two ranks share 4 experts, and divide the matrices of 3 experts and of layers."""
    config = json.loads((model_dir(family) / "config.json").read_text())
    create_model(config if experts is None else config | {"num_experts": experts}, tmp_path, seed=7)
    optimizer = replace(MUON, eps=1e-3)  # a smaller one magnifies rounding in AdamW's first step
    build = partial(new_policy, tmp_path, optimizer=optimizer)
    one = build()
    with closing(DistributedPolicy(LocalExecutor(), build, ranks=2)) as two:
        train(two, range(2))
        train(one, range(2))
        for (name, tensor), (expected_name, expected) in zip(two.weights(), one.weights(), strict=True):
            assert name == expected_name
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)
