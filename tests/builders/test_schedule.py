"""The learning rate of every step of a run, beside torch's own schedule over the steps that the run really makes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.stages.advantages import Models
from slimectl.stages.train import train
from slimectl.types import Sample, Status

PROMPTS, SIZE = 2, 2


def settings(rounds: int | None, **sections: Any) -> Settings:
    """Rounds of two prompts with two answers each."""
    sections["train"] = {"lr": 8.0, "lr_decay_style": "cosine", "device": "cpu", **sections.get("train", {})}
    sections["run"] = {"num_rollout": rounds, "rollout_batch_size": PROMPTS, **sections.get("run", {})}
    sections["algorithm"] = {"name": "grpo", **sections.get("algorithm", {})}
    return Settings.model_validate({"rollout": {"n_samples_per_prompt": SIZE}, **sections})


def attempts(rounds: int) -> list[Sample]:
    draw = random.Random(0)
    return [
        Sample(i // SIZE, i, tokens=[65, *(draw.randrange(256) for _ in range(3))], response_length=3,
               reward=float(i % SIZE), status=Status.COMPLETED, weight_versions=["0"])
        for i in range(rounds * PROMPTS * SIZE)
    ]  # fmt: skip


def cosine(steps: int) -> list[float]:
    """Rates of torch's schedule that falls to 0 over so many steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=8.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("rounds", "sections", "steps"),
    [
        (4, {}, 4),
        (4, {"train": {"global_batch_size": 8}}, 2),  # a step spans two rounds of four
        (4, {"train": {"global_batch_size": 6}}, 3),  # 16 = 6 + 6 + 4
        (4, {"train": {"global_batch_size": 3}}, 6),  # 16 = 5 x 3 + 1
        (4, {"train": {"global_batch_size": 40}}, 1),
        (4, {"train": {"num_steps_per_rollout": 2}}, 8),
        (4, {"algorithm": {"name": "ppo", "num_critic_only_steps": 2}}, 2),  # the critic alone learns in two of four
        (4, {"algorithm": {"name": "ppo", "critic": "shared", "num_critic_only_steps": 2}}, 4),
    ],
)
def test_the_schedule_ends_with_the_last_step_for_every_batch_size(
    model_dir: Callable[..., Path], rounds: int, sections: dict[str, Any], steps: int
):
    given = settings(rounds, **sections)
    total = builders.total_steps(given)
    policy = builders.policy(given, model_dir(), total_steps=total)
    critic = builders.critic(given, model_dir(), total_steps=total)
    reports = list(train(attempts(rounds), Models(policy, critic), given))
    rates = [report.metrics["train/lr"] for report in reports if "train/lr" in report.metrics]
    assert total == steps
    assert rates == pytest.approx(cosine(steps), abs=1e-12)


@pytest.mark.parametrize(
    ("sections", "rollouts", "steps"),
    [
        ({}, 10, 5),  # 20 rollouts of two passes, in rounds of four
        ({"train": {"global_batch_size": 8}}, 10, 3),
        ({"algorithm": {"name": "sft"}, "train": {"global_batch_size": 3}}, 10, 7),
    ],
)
def test_passes_over_a_file_are_counted_together(sections: dict[str, Any], rollouts: int, steps: int):
    given = settings(None, **sections, run={"num_epoch": 2})
    assert builders.total_steps(given, rollouts=rollouts) == steps
    assert builders.total_steps(given) is None
