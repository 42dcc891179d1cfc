"""How [train] says that rows become micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slimectl.algorithms.packing import BatchingOptions
from slimectl.builders.policies import policy
from slimectl.settings.loading import from_assignments, resolve

# Two layers of 64 x 64 (q, o), 64 x 32 (k, v) and 64 x 128 (gate, up, down) with two norms of 64, a last norm, and the
# embedding of 259 tokens, which is the output too; attention multiplies 4 heads of 16 twice, in both layers.
PARAMETERS = 2 * (2 * 4096 + 2 * 2048 + 3 * 8192 + 2 * 64) + 64 + 259 * 64
PAIR_COST = 2 * (4 * 2 * 16) / PARAMETERS


@pytest.mark.parametrize(
    ("assignments", "batching"),
    [
        ([], BatchingOptions(None, "tokens")),
        (["train.balance_data=false"], BatchingOptions(None, "none")),
        (["train.use_dynamic_batch_size=false", "train.micro_batch_size=3"], BatchingOptions(3, "tokens")),
        (["train.balance_by_flops=true"], BatchingOptions(None, "flops", PAIR_COST)),
    ],
)
def test_settings_say_how_rows_are_batched(
    model_dir: Callable[..., Path], assignments: list[str], batching: BatchingOptions
):
    settings = resolve([from_assignments(["train.device=cpu", *assignments])]).settings
    made = policy(settings, model_dir(), total_steps=None)
    assert made.batching == batching  # type: ignore[attr-defined]
