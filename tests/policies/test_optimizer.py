"""Schedules by hand, and beside those of transformers and Megatron-core."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from slimectl.errors import SettingsError
from slimectl.policies.fsdp.master_weights import Shard, sharded_dimension
from slimectl.policies.moments import ShardElements
from slimectl.policies.optimizer import (
    ChunkedAdamW,
    OptimizerOptions,
    changed_schedule,
    lr_at,
    unmet_schedule,
)


def rates(count: int, **options: object) -> list[float]:
    return [lr_at(step, OptimizerOptions(lr=8.0, **options)) for step in range(count)]


def test_constant_after_a_linear_warmup():
    assert rates(6, warmup_steps=4) == [0, 2, 4, 6, 8, 8]


def test_linear_falls_to_min_lr_and_stays():
    assert rates(7, schedule="linear", warmup_steps=1, decay_steps=5, min_lr=4.0) == [0, 8, 7, 6, 5, 4, 4]


def test_cosine_is_halfway_in_the_middle():
    found = rates(6, schedule="cosine", decay_steps=4)
    assert found == pytest.approx([8, 4 * (1 + 0.5**0.5), 4, 4 * (1 - 0.5**0.5), 0, 0])


def test_a_falling_schedule_needs_its_end():
    with pytest.raises(SettingsError, match="needs decay_steps"):
        OptimizerOptions(schedule="cosine")
    with pytest.raises(SettingsError, match="above warmup_steps"):
        OptimizerOptions(schedule="linear", decay_steps=3, warmup_steps=3)


def test_inverse_square_root_falls_with_the_root_of_the_step():
    # 8 sqrt(4 / step): 8 at step 4, 4 at step 16; after step 16 the rate is min_lr
    found = rates(19, schedule="inverse-square-root", warmup_steps=4, decay_steps=16, min_lr=1.0)
    assert found[:5] == [0, 2, 4, 6, 8]
    assert found[9] == pytest.approx(8 * 2 / 3)
    assert found[16:] == [4, 1, 1]
    assert rates(5, schedule="inverse-square-root") == pytest.approx([8, 8, 8 / 2**0.5, 8 / 3**0.5, 4])


@pytest.mark.parametrize(
    ("style", "decay"),
    [
        ("linear", [8, 6.5, 5, 3.5, 2]),
        ("minus_sqrt", [8, 5, 2 + 6 * (1 - 0.5**0.5), 2 + 6 * (1 - 0.75**0.5), 2]),
        ("cosine", [8, 2 + 3 * (1 + 0.5**0.5), 5, 2 + 3 * (1 - 0.5**0.5), 2]),
        ("exponential", [8, 2 + 6 * (2 * 0.5**0.25 - 1), 2 + 6 * (2 * 0.5**0.5 - 1), 2 + 6 * (2 * 0.5**0.75 - 1), 2]),
    ],
)
def test_wsd_is_stable_until_its_last_steps(style: str, decay: list[float]):
    found = rates(10, schedule="WSD", warmup_steps=2, decay_steps=8, wsd_steps=4, wsd_style=style, min_lr=2.0)
    assert found == pytest.approx([0, 4, 8, 8, *decay, 2])


@pytest.mark.parametrize("wsd_steps", [0, 7])
def test_the_decay_of_wsd_fits_between_warmup_and_end(wsd_steps: int):
    with pytest.raises(SettingsError, match="must be from 1 to 6, the steps between the warm-up and the end"):
        OptimizerOptions(schedule="WSD", warmup_steps=2, decay_steps=8, wsd_steps=wsd_steps)


def scheduled(scheduler: Any, optimizer: torch.optim.Optimizer, count: int, **increment: int) -> list[float]:
    """Return the rates that a scheduler of another library gives its first steps."""
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(**increment)
    return found


def plain_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=8.0)


SHAPES = ["exponential", "linear", "cosine", "minus_sqrt"]


@pytest.mark.parametrize(
    ("schedule", "style"),
    [*((name, "linear") for name in ("constant", "linear", "cosine", "inverse-square-root")),
     *(("WSD", shape) for shape in SHAPES)],
)  # fmt: skip
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("min_lr", [0.0, 0.5])
def test_every_step_has_the_rate_that_megatron_gives_it(schedule: str, style: str, warmup: int, min_lr: float):
    megatron = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    optimizer = plain_optimizer()
    scheduler = megatron.OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=8.0, min_lr=min_lr, lr_warmup_steps=warmup, lr_decay_steps=9,
        lr_decay_style=schedule, start_wd=0.0, end_wd=0.0, wd_incr_steps=0, wd_incr_style="constant",
        wsd_decay_steps=5, lr_wsd_decay_style=style,
    )  # fmt: skip
    options = {"decay_steps": 9, "wsd_steps": 5, "wsd_style": style, "min_lr": min_lr}
    expected = scheduled(scheduler, optimizer, 12, increment=1)
    assert rates(12, schedule=schedule, warmup_steps=warmup, **options) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "name", "specific"),
    [
        ("constant", "constant_with_warmup", {}),
        ("linear", "linear", {}),
        ("cosine", "cosine", {}),
        ("inverse-square-root", "inverse_sqrt", {}),
        ("WSD linear", "warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "linear"}),
        ("WSD cosine", "warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "cosine"}),
        ("WSD minus_sqrt", "warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "1-sqrt"}),
    ],
)
def test_every_step_has_the_rate_that_transformers_gives_it(schedule: str, name: str, specific: dict[str, Any]):
    optimizer = plain_optimizer()
    scheduler = transformers.get_scheduler(name, optimizer, 3, 9, scheduler_specific_kwargs=specific)
    kind, _, style = schedule.partition(" ")
    options = {"decay_steps": 9, "wsd_steps": 5, "wsd_style": style or "linear"}
    expected = scheduled(scheduler, optimizer, 9)
    assert rates(9, schedule=kind, warmup_steps=3, **options) == pytest.approx(expected)


def test_a_run_says_how_far_a_schedule_came_that_counted_other_steps():
    options = OptimizerOptions(lr=8.0, schedule="linear", decay_steps=4, min_lr=1.0)
    assert unmet_schedule(4, options) == ""
    assert unmet_schedule(3, OptimizerOptions()) == ""
    # update 2 of 0 to 2: 1 + 7 (1 - 2 / 4)
    assert "counted 4 steps, and the run made 3: it ended at 4.5, 0.56 of its peak." in unmet_schedule(3, options)
    assert "made 6: from step 5 on the rate was 1. Set train.lr_decay_iters=6" in unmet_schedule(6, options)


def test_a_resume_says_from_and_to_of_a_rate_that_changes():
    before = OptimizerOptions(lr=8.0, schedule="linear", decay_steps=4)
    now = OptimizerOptions(lr=8.0, schedule="linear", decay_steps=8)
    # 8 (1 - 3 / 4) and 8 (1 - 3 / 8)
    assert changed_schedule(3, before, now) == (
        "the learning rate of the next step changes from 2 to 5 (end of the decay 8, was 4)"
    )
    assert changed_schedule(0, before, now) == ""  # both are at the peak
    assert changed_schedule(1, before, OptimizerOptions(lr=8.0, warmup_steps=4)).endswith(
        "from 6 to 2 (decay constant, was linear, warm-up steps 4, was 0, end of the decay None, was 4)"
    )


def test_moments_in_bfloat16_follow_small_changes_that_the_nearest_value_loses():
    parameter = torch.zeros(4096, requires_grad=True)
    optimizer = ChunkedAdamW([parameter], lr=0.0, betas=(0.9, 0.999), weight_decay=0.0)
    nearest = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(400):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        nearest = (nearest.float() * 0.999 + 0.001).bfloat16()
    second = optimizer.state[parameter]["exp_avg_sq"]
    assert second.dtype == torch.bfloat16
    assert second.double().mean().item() == pytest.approx(1 - 0.999**400, rel=1e-2)
    assert nearest.item() < 0.26  # 0.33 is right


def test_moments_in_bfloat16_give_the_steps_of_adamw():
    draw = torch.Generator().manual_seed(0)
    weights = [torch.ones(3000, requires_grad=True) for _ in range(2)]
    options = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = ChunkedAdamW(weights[:1], **options), torch.optim.AdamW(weights[1:], **options)
    for i in range(20):
        gradient = torch.randn(3000, generator=draw)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
        if i == 0:  # nothing has been rounded yet
            torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-7)
    errors = weights[0] - weights[1]
    assert errors.abs().max() < 0.02
    assert abs(errors.mean().item()) < 2e-4  # right on average, where a step is 0.01


def test_shards_of_a_parameter_get_the_moments_of_the_whole():
    whole, gradient = (
        torch.zeros(1000, requires_grad=True),
        torch.randn(1000, generator=torch.Generator().manual_seed(1)),
    )
    shards = [torch.zeros(600, requires_grad=True), torch.zeros(400, requires_grad=True)]
    optimizers = ChunkedAdamW([whole]), ChunkedAdamW(shards, shards={shards[1]: ShardElements(600)})
    whole.grad, shards[0].grad, shards[1].grad = gradient, gradient[:600].clone(), gradient[600:].clone()
    for optimizer in optimizers:
        optimizer.step()
    for moment in ("exp_avg", "exp_avg_sq"):
        joined = torch.cat([optimizers[1].state[shard][moment] for shard in shards])
        assert torch.equal(joined, optimizers[0].state[whole][moment])


def test_shards_of_another_dimension_than_the_first_get_the_moments_of_the_whole():
    gradient = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1))
    whole = torch.zeros(3, 8, 5, requires_grad=True)
    parts = [torch.zeros(3, 4, 5, requires_grad=True) for _ in range(2)]
    cuts = [Shard.of_rank(whole.shape, rank, 2) for rank in range(2)]
    assert [(cut.dimension, cut.start, cut.length) for cut in cuts] == [(1, 0, 4), (1, 4, 4)]  # 2 ranks, 3 experts
    shards = {part: cut.elements for part, cut in zip(parts, cuts, strict=True)}
    optimizers = ChunkedAdamW([whole]), ChunkedAdamW(parts, shards=shards)
    whole.grad = gradient
    for part, cut in zip(parts, cuts, strict=True):
        part.grad = cut.cut(gradient).clone()
    for optimizer in optimizers:
        optimizer.step()
    for moment in ("exp_avg", "exp_avg_sq"):
        joined = torch.cat([optimizers[1].state[part][moment] for part in parts], dim=1)
        assert torch.equal(joined, optimizers[0].state[whole][moment])


@pytest.mark.parametrize(
    ("shape", "ranks", "dimension"),
    [
        ((128, 1536, 2048), 64, 0),
        ((128, 1536, 2048), 512, 1),  # the experts would be padded to 512
        ((128, 1400, 2048), 512, 2),
        ((5, 7, 3), 2, 0),  # no dimension divides: the experts are padded to 6
        ((151_937, 2048), 512, 0),
        ((64,), 512, 0),
    ],
)
def test_fused_experts_are_divided_by_a_dimension_without_padding(shape: tuple[int, ...], ranks: int, dimension: int):
    assert sharded_dimension(torch.Size(shape), ranks) == dimension


@pytest.mark.parametrize(("experts", "dimension"), [(4, 0), (5, 1), (3, 2)])
def test_each_rank_gets_its_part_of_every_expert(experts: int, dimension: int):
    rows, columns = (4, 6) if dimension == 1 else (7, 6)
    full = torch.arange(experts * rows * columns).view(experts, rows, columns)
    for rank in range(2):
        shard = Shard.of_rank(full.shape, rank, 2)
        assert shard.dimension == dimension
        local = torch.full_like(shard.cut(full), -1)
        for expert in range(experts):
            for part in (slice(0, 3), slice(3, rows)):
                shard.assign_expert(full[expert, part], local, expert, part)
        assert torch.equal(local, shard.cut(full))
        assert torch.equal(shard.elements.indices(0, local.numel()), local.flatten())
