"""Parameters from shapes alone: of the cards against what was announced, of small models by hand."""

from __future__ import annotations

import pytest
from hf_models import config_of

from slimectl.architectures import cards
from slimectl.architectures.registry import Parameters, parameters, shapes

ANNOUNCED = {
    "deepseek-v3": (671, 37),
    "kimi-k2": (1026, 32),
    "moonlight": (16, 3),
    "glm4.5-355B-A32B": (355, 32),
    "glm4.5-106B-A12B": (106, 12),
    "minimax-m2": (230, 10),
    "qwen3-30B-A3B": (30.5, 3.3),
    "qwen3-235B-A22B": (235, 22),
    "qwen3-next-80B-A3B": (80, 3),
    "qwen3.5-35B-A3B": (35, 3),
    "glm5-744B-A40B": (744, 40),
}
"""Billions in all and for one token."""


@pytest.mark.parametrize("card", ANNOUNCED)
def test_announced_totals_of_published_models(card):
    """By the numbers of the cards, which test_cards.py compares with the shapes and with transformers' models."""
    numbers = cards.load(card)
    config = cards.language_model(numbers["config"])
    total, activated = ANNOUNCED[card]
    assert numbers["parameters"] / 1e9 == pytest.approx(total, rel=0.01)
    # Some announce what a token passes through with embedding and head, some without.
    tables = 2 * config["vocab_size"] * config["hidden_size"]
    assert numbers["activated"] - tables - 0.5e9 <= activated * 1e9 <= numbers["activated"] + 0.5e9


def test_counts_of_a_small_mixture_by_hand():
    config = config_of("qwen3_moe")
    attention = 64 * 32 + 2 * 32 * 32 + 32 * 64 + 16 + 16
    expert, router, norms = 3 * 24 * 32, 4 * 32, 2 * 32
    outer = 2 * 96 * 32 + 32
    layer = attention + router + norms
    assert parameters(config) == Parameters(outer + 2 * (layer + 4 * expert), outer + 2 * (layer + 2 * expert))


def test_shapes_are_those_on_disk():
    found = shapes(config_of("qwen3"))
    assert found["model.layers.1.self_attn.q_proj.weight"] == (64, 32)
    assert found["lm_head.weight"] == (96, 32)
    assert "lm_head.weight" not in shapes(config_of("qwen3 tied"))
