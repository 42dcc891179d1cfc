"""Packs of Megatron-core that do not fit into memory: divided by one process, named for several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from memory_limit import MemoryLimit
from policies.policy_cases import Clipped, random_rows
from rank_cases import megatron

from slimectl.errors import OutOfMemoryError

ModelDir = Callable[..., Path]


def test_a_divided_pack_gives_the_same_step(four_layers: ModelDir):
    rows = random_rows(groups=4)
    plain, limited = (megatron(four_layers(), max_tokens_per_pack=4096) for _ in range(2))
    for policy in (plain, limited):  # fills the caches of libraries
        policy.forward_backward(rows, Clipped())
        policy.optim_step()
    with MemoryLimit() as memory:
        expected = plain.forward_backward(rows, Clipped())
    with MemoryLimit(0.9 * memory.peak) as memory:
        found = limited.forward_backward(rows, Clipped())
    assert memory.faults
    assert found == pytest.approx(expected, rel=2e-6)
    assert limited.optim_step() == pytest.approx(plain.optim_step(), rel=1e-6)
    limited.fitter.limit(4096)
    with MemoryLimit(3e5) as memory:
        outputs = limited.log_probs(rows)
    assert memory.faults
    for row, expected_row in zip(outputs, plain.log_probs(rows), strict=True):
        assert row == pytest.approx(expected_row, abs=1e-5)


def test_one_long_sample_needs_a_model_that_recomputes(four_layers: ModelDir):
    policy, rows = megatron(four_layers()), random_rows(groups=1)[:1]
    with MemoryLimit() as memory:
        policy.forward_backward(rows, Clipped())
    policy.optim_step()
    fault = "alone. Set train.gradient_checkpointing = true"
    with MemoryLimit(0.7 * memory.peak), pytest.raises(OutOfMemoryError, match=fault) as raised:
        policy.forward_backward(rows, Clipped())
    assert raised.value.settings == {"train.gradient_checkpointing": True}


def test_the_size_of_a_pack_is_measured(four_layers: ModelDir):
    policy, rows = megatron(four_layers()), random_rows(groups=4)
    policy.measure_pack(rows, Clipped(), 4096)  # fills the caches of libraries
    with MemoryLimit() as memory:
        assert policy.measure_pack(rows, Clipped(), 4096) == 0.0
    with MemoryLimit(0.9 * memory.peak):
        assert policy.measure_pack(rows, Clipped(), 4096) is None
        assert policy.measure_pack(rows, Clipped(), 30) == 0.0
    policy.limit_packs(30)
    assert policy.fitter.planning.max_tokens_per_pack == 30
    assert policy.optim_step()["grad_norm"] == 0.0
