"""Schedules by hand."""

from __future__ import annotations

import pytest

from slimectl.errors import SettingsError
from slimectl.policies.optimizer import OptimizerOptions, lr_at


def rates(count: int, **options: object) -> list[float]:
    return [lr_at(step, OptimizerOptions(lr=8.0, **options)) for step in range(count)]


def test_constant_after_a_linear_warmup():
    assert rates(6, warmup_steps=4) == [2, 4, 6, 8, 8, 8]


def test_linear_falls_to_min_lr_and_stays():
    assert rates(7, schedule="linear", warmup_steps=1, decay_steps=5, min_lr=4.0) == [8, 8, 7, 6, 5, 4, 4]


def test_cosine_is_halfway_in_the_middle():
    found = rates(6, schedule="cosine", decay_steps=4)
    assert found == pytest.approx([8, 4 * (1 + 0.5**0.5), 4, 4 * (1 - 0.5**0.5), 0, 0])


def test_a_falling_schedule_needs_its_end():
    with pytest.raises(SettingsError, match="needs decay_steps"):
        OptimizerOptions(schedule="cosine")
    with pytest.raises(SettingsError, match="above warmup_steps"):
        OptimizerOptions(schedule="linear", decay_steps=3, warmup_steps=3)
