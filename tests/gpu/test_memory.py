"""What leaves a GPU, really leaves it: offload, sleep and moments in bfloat16, by what CUDA says is allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import Clipped, new_policy, random_rows

from slimectl.policies.optimizer import OptimizerOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ModelDir = Callable[..., Path]
ROUNDED = {"optimizer": OptimizerOptions(lr=1e-3, state_dtype="bfloat16")}


def trained(model_dir: ModelDir, **options: Any) -> tuple[Any, list[dict[str, float]], int]:
    """A policy after two steps, their reports, and the bytes that it holds on the GPU."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    policy = new_policy(model_dir("qwen3_moe"), device="cuda", **options)
    reports = []
    for step in range(2):
        reports.append(policy.forward_backward(random_rows(seed=step), Clipped()) | policy.optim_step())
    return policy, reports, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_what_is_offloaded_is_not_on_the_gpu_and_the_steps_are_the_same(model_dir: ModelDir, offload: str):
    _, expected, resident = trained(model_dir)
    policy, reports, offloaded = trained(model_dir, offload=offload)
    for found, wanted in zip(reports, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
    parameters = sum(shape.numel() for shape in policy.masters.shapes.values())
    assert offloaded <= resident - (8 if offload == "optimizer" else 12) * parameters + 2**20
    assert {tensor.device.type for tensor in policy.masters.trained.values()} == {"cpu"}


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, ROUNDED], ids=str)
def test_a_policy_that_sleeps_leaves_the_gpu_and_goes_on(model_dir: ModelDir, tmp_path: Path, options: dict[str, Any]):
    awake, _, _ = trained(model_dir, **options)
    policy, _, resident = trained(model_dir, **options)
    before = torch.cuda.memory_allocated()
    policy.sleep()
    asleep = torch.cuda.memory_allocated()
    assert before - asleep >= 0.9 * resident
    policy.save(tmp_path)
    assert torch.cuda.memory_allocated() == asleep
    awake.load(tmp_path)
    rows = random_rows(seed=2)
    found, expected = (p.forward_backward(rows, Clipped()) | p.optim_step() for p in (policy, awake))
    assert found == pytest.approx(expected, rel=1e-5)


def test_moments_in_bfloat16_take_half_the_memory(model_dir: ModelDir):
    policy, _, full = trained(model_dir)
    _, _, rounded = trained(model_dir, **ROUNDED)
    parameters = sum(shape.numel() for shape in policy.masters.shapes.values())
    assert full - rounded == pytest.approx(4 * parameters, rel=0.05)
