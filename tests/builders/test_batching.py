"""How [train] says that rows become micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slimectl.algorithms.packing import BatchingOptions
from slimectl.runtime.builders.policies import policy, round_timer
from slimectl.runtime.builders.trainers import Packing, policy_backend
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve
from slimectl.types import TrainingSample

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
    assert made.options.batching == batching  # type: ignore[attr-defined]


MEGATRON = ["train.backend=megatron", "train.max_tokens_per_gpu=64", "cluster.actor_num_gpus_per_node=4"]


@pytest.mark.parametrize(
    ("assignments", "packing"),
    [
        (["train.max_tokens_per_gpu=64"], Packing(64, 1, True)),
        (["train.max_tokens_per_gpu=64", "train.share_prompt_prefix=false"], Packing(64, 1, False)),
        ([*MEGATRON, "megatron.tensor_model_parallel_size=2"], Packing(64, 2, True)),
        ([*MEGATRON, "megatron.context_parallel_size=2"], Packing(128, 2, True)),
        ([*MEGATRON, "megatron.use_routing_replay=true"], Packing(64, 4, True)),
        ([*MEGATRON, "megatron.args.moe_z_loss_coeff=0.001"], Packing(64, 4, False)),
    ],
)
def test_the_share_of_tokens_is_that_of_the_trainers_packs(
    model_dir: Callable[..., Path], assignments: list[str], packing: Packing
):
    settings = resolve([from_assignments(["train.device=cpu", *assignments])]).settings
    assert policy_backend(settings.train).packing(settings, model_dir()) == packing
    timer = round_timer(settings, model_dir(), policy=None)  # type: ignore[arg-type]
    timer.count_training([TrainingSample([*range(20), 30 + i], 1, [1.0]) for i in range(8)])
    # Eight rows of 20 equal tokens in as many packs as there are ranks.
    shared = 1 - packing.ranks / 8 if packing.shares_prefixes else 0
    assert timer.take()["perf/shared_tokens_ratio"] == shared
