"""Arguments of Megatron-core that overlap messages with computation: the same numbers, or a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import STEADY, Ranks
from test_equal_ranks import two_steps

from slimectl.architectures.parallel import ParallelLayout
from slimectl.errors import SettingsError
from slimectl.policies.megatron.preflight import check_training
from slimectl.policies.options import MegatronOptions, TrainerOptions

ModelDir = Callable[..., Path]
INTERLEAVED = ParallelLayout(pipeline=2, virtual_pipeline=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout", "args"),
    [
        ("dense", ParallelLayout(pipeline=2), {"batch_p2p_comm": False, "deallocate_pipeline_outputs": True}),
        ("dense", INTERLEAVED, {"overlap_p2p_comm": True, "batch_p2p_comm": False}),
        ("latent", ParallelLayout(tensor=2, expert=2), {"moe_shared_expert_overlap": True}),
        ("dense", ParallelLayout(), {"bucket_size": 1000, "overlap_cpu_optimizer_d2h_h2d": True}),
    ],
    ids=str,
)
def test_two_ranks_make_the_same_steps_with_it(two: Ranks, four_layers: ModelDir, kind: str, layout: Any, args: Any):
    plain = two.build(four_layers(kind), layout=layout)
    reports, weights = two_steps(plain), {name: tensor.clone() for name, tensor in plain.weights()}
    overlapped = two.build(four_layers(kind), layout=layout, args=args)
    for report, expected in zip(two_steps(overlapped), reports, strict=True):  # MKL's last digit may follow an address
        assert report == pytest.approx(expected, rel=1e-6)
    for name, tensor in overlapped.weights():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("layout", "args", "reason"),
    [
        (None, {"overlap_grad_reduce": True}, r"not possible \(gradients are reduced once per step, after all"),
        (
            None,
            {"overlap_param_gather": True},
            r"not possible \(weights are read between steps, and the head separately",
        ),
        (None, {"overlap_param_gather_with_optimizer_step": True}, r"not possible \(weights are read between steps"),
        (None, {"tp_comm_overlap": True}, r"no effect \(it needs buffers of TransformerEngine"),
        (None, {"delay_wgrad_compute": True}, r"no effect \(it needs TransformerEngine's linear layers"),
        (None, {"overlap_moe_expert_parallel_comm": True}, r"no effect \(its schedule divides megatron-core's own"),
        (None, {"overlap_p2p_comm": True}, r"not possible \(only interleaved stages"),
        (None, {"use_ring_exchange_p2p": True}, r"not possible \(torch has no ring exchange"),
        (INTERLEAVED, {"overlap_p2p_comm_warmup_flush": True}, r"not possible \(stages exchange the shapes of packs"),
        (
            INTERLEAVED,
            {"batch_p2p_comm": True},
            r"not possible \(one batch would mix up the messages that interleaved stages",
        ),
        (INTERLEAVED, {"overlap_p2p_comm": False}, r"False, but interleaved stages overlap"),
    ],
    ids=str,
)
def test_what_is_not_the_same_is_refused_before_a_model_is_built(
    four_layers: ModelDir, layout: ParallelLayout | None, args: dict[str, Any], reason: str
):
    (name,) = args
    megatron_options = MegatronOptions(layout=layout or ParallelLayout(), args=args)
    with pytest.raises(SettingsError, match=rf"^megatron\.args\.{name}: .*{reason}"):
        check_training(four_layers(), TrainerOptions(optimizer=STEADY), megatron_options)
