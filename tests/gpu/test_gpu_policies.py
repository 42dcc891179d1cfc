"""A policy on a GPU is the one on a CPU: its steps, its checkpoints; and how often a step waits for the GPU."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import Clipped, WeightedNegativeLogProb, new_policy, random_rows

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.types import TrainingSample

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ModelDir = Callable[..., Path]
FLOAT32 = {"rel": 1e-3, "abs": 1e-5}
"""Differences of sums in float32 that add in another order; losses and norms of these models are 0.1 to 10."""
BFLOAT16 = {"rel": 0.1, "abs": 0.02}
"""Differences of a bfloat16 step from a float32 one; on a CPU they are 2 % at most in these models."""
MOST_WAITS = 48
"""Waits of a step of one pack: for copies of its layout to the GPU, a tensor each, for its sums and its norm."""


def train(policy: Any, steps: range) -> list[dict[str, float]]:
    """The reports of some steps, each on rows of its own."""
    return [policy.forward_backward(random_rows(seed=step), Clipped()) | policy.optim_step() for step in steps]


def assert_close(
    reports: list[dict[str, float]], expected: list[dict[str, float]], tolerance: dict[str, float]
) -> None:
    for report, other in zip(reports, expected, strict=True):
        for name in ("loss", "ratio", "grad_norm"):
            assert report[name] == pytest.approx(other[name], **tolerance), name
        assert report["grad_norm"] > 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_steps_on_the_gpu_have_loss_and_gradient_norm_of_the_cpu(model_dir: ModelDir, family: str):
    on_cpu = train(new_policy(model_dir(family)), range(2))
    assert_close(train(new_policy(model_dir(family), device=DEVICE), range(2)), on_cpu, FLOAT32)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_steps_in_bfloat16_on_the_gpu_are_near_those_in_float32_on_the_cpu(model_dir: ModelDir, family: str):
    on_cpu = train(new_policy(model_dir(family)), range(2))
    assert_close(train(new_policy(model_dir(family), device=DEVICE, dtype="bfloat16"), range(2)), on_cpu, BFLOAT16)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", FLOAT32), ("bfloat16", BFLOAT16)], ids=str)
def test_megatrons_steps_on_the_gpu_are_those_of_fsdp_on_the_cpu(
    model_dir: ModelDir, dtype: str, tolerance: dict[str, float]
):
    pytest.importorskip("megatron.core")
    from slimectl.policies.megatron.policy import MegatronPolicy

    on_cpu = train(new_policy(model_dir("qwen3")), range(2))
    policy = MegatronPolicy(
        model_dir("qwen3"), HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-3), dtype=dtype)
    )
    assert policy.device.type == DEVICE
    assert_close(train(policy, range(2)), on_cpu, tolerance)


def test_log_probs_on_the_gpu_are_those_of_the_cpu(model_dir: ModelDir):
    rows = random_rows()
    expected, on_gpu = (new_policy(model_dir("qwen3"), device=device).log_probs(rows) for device in ("cpu", DEVICE))
    for values, others in zip(on_gpu, expected, strict=True):
        assert values == pytest.approx(others, abs=1e-4)


@pytest.mark.parametrize(("source", "target"), [(DEVICE, "cpu"), ("cpu", DEVICE)], ids=["to the CPU", "to the GPU"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_goes_on_on_the_other_device_with_the_same_weights(
    model_dir: ModelDir, tmp_path: Path, source: str, target: str, dtype: str
):
    first = new_policy(model_dir("qwen3"), device=source, dtype=dtype)
    train(first, range(2))
    first.save(tmp_path)
    second = new_policy(model_dir("qwen3"), device=target, dtype=dtype)
    train(second, range(5, 6))
    second.load(tmp_path)
    assert second.weight_version == "2"
    for (name, tensor), (other_name, other) in zip(first.weights(), second.weights(), strict=True):
        assert name == other_name
        assert torch.equal(tensor.cpu(), other.cpu()), name
    # The second of these steps has the weights that the first one's moments led to.
    assert_close(train(second, range(2, 4)), train(first, range(2, 4)), FLOAT32 if dtype == "float32" else BFLOAT16)


def even_rows(count: int, length: int) -> list[TrainingSample]:
    """Rows of one length that share no token."""
    draw = random.Random(0)
    return [
        TrainingSample(
            [draw.randrange(256) for _ in range(length + 1)], length, [0.01] * length, [1.0] * length, group=i
        )
        for i in range(count)
    ]


def waits(policy: Any, rows: list[TrainingSample]) -> int:
    """How often a step waits for the GPU, copies from the host's memory included."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            policy.forward_backward(rows, WeightedNegativeLogProb())
            policy.optim_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(message.message) for message in messages)


def test_a_step_waits_for_the_gpu_a_few_times_however_many_tokens_it_has(model_dir: ModelDir):
    policy = new_policy(model_dir("qwen3"), device=DEVICE)
    waits(policy, even_rows(4, 16))  # the first step allocates, and loads kernels
    counts = [waits(policy, even_rows(count, length)) for count, length in ((4, 16), (4, 200), (12, 200))]
    assert 0 < counts[0] <= MOST_WAITS, counts
    assert counts == [counts[0]] * 3


def test_a_pack_that_does_not_fit_is_divided(model_dir: ModelDir):
    rows = random_rows(groups=400, answers=8)
    policy = new_policy(model_dir("qwen3"), device=DEVICE, max_tokens_per_pack=2**20)
    assert 0 < policy.measure_pack(rows, Clipped(), 2**20) <= 1
    policy.limit_packs(2**20)
    torch.cuda.reset_peak_memory_stats()
    expected = policy.forward_backward(rows, Clipped())
    norm = policy.optim_step()["grad_norm"]
    limited = new_policy(model_dir("qwen3"), device=DEVICE, max_tokens_per_pack=2**20)
    share = 0.6 * torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        found = limited.forward_backward(rows, Clipped())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert limited.fitter.planning.max_tokens_per_pack < 2**20
    assert found == pytest.approx(expected, rel=1e-5)
    assert limited.optim_step()["grad_norm"] == pytest.approx(norm, rel=1e-5)
