"""Distillation from distributions on Megatron-core, at any layout that holds the teacher beside the policy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from policies.distillation_cases import (
    ENDS,
    TEMPERATURE,
    Distilled,
    assert_named,
    plain_distillation,
    rows_to_distill,
    with_likeliest,
)
from policies.trie_cases import calm_model
from rank_cases import Ranks, megatron

from slimectl.architectures.parallel import ParallelLayout
from slimectl.errors import SettingsError

ModelDir = Callable[..., Path]
LAYOUTS = [ParallelLayout(tensor=2), ParallelLayout(context=2), ParallelLayout()]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrower model with the same 259 tokens, which do not divide by two."""
    return calm_model(tmp_path_factory.mktemp("teacher"), initializer_range=0.2)


def distilled(student: Path, teacher: Path | None, **options: Any) -> Any:
    """A policy that compares distributions with a teacher's on the same ranks."""
    policy = megatron(student, temperature=TEMPERATURE, **options)
    if teacher is not None:
        policy.set_teacher(megatron(teacher, temperature=TEMPERATURE, trains=False, **options))
    return policy


def assert_step(policy: Any, student: Path, teacher: Path, lists: Any, top_k: int | None) -> None:
    """`lists` gives rows the likeliest tokens of the teacher."""
    rows, divergence = rows_to_distill(), ENDS[2]
    expected = plain_distillation(student, teacher, rows, divergence, top_k)
    if top_k is not None:
        with_likeliest(rows, lists, top_k)
        assert_named(rows, expected)
    assert policy.forward_backward(rows, Distilled(divergence)) == pytest.approx(expected.metrics, rel=1e-5)
    assert policy.optim_step()["grad_norm"] == pytest.approx(expected.norm, rel=1e-5)


@pytest.mark.parametrize("kind", ["dense", "tied", "windows"])
@pytest.mark.parametrize("top_k", [5, None])
def test_one_rank_learns_what_rows_alone_learn(four_layers: ModelDir, teacher: Path, kind: str, top_k: int | None):
    student = four_layers(kind)
    policy = distilled(student, None if top_k else teacher)
    assert_step(policy, student, teacher, megatron(teacher, temperature=TEMPERATURE, trains=False), top_k)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=["tensor", "context", "data"])
@pytest.mark.parametrize("top_k", [5, None])
def test_two_ranks_learn_what_rows_alone_learn(
    two: Ranks, four_layers: ModelDir, teacher: Path, layout: ParallelLayout, top_k: int | None
):
    student = four_layers("dense")
    rows, alone = rows_to_distill(), megatron(teacher, temperature=TEMPERATURE, trains=False)
    if top_k is not None:  # the ranks of the teacher themselves name the tokens
        two.hold(partial(megatron, teacher, layout=layout, temperature=TEMPERATURE, trains=False))
        with_likeliest(rows, two, top_k)
        assert_named(rows, plain_distillation(student, teacher, rows, ENDS[0], top_k))
    two.hold(partial(distilled, student, None if top_k else teacher, layout=layout))
    assert_step(two, student, teacher, alone, top_k)


def test_a_teacher_of_another_vocabulary_is_one_line(four_layers: ModelDir, tmp_path: Path):
    other = calm_model(tmp_path, vocab_size=300)
    with pytest.raises(SettingsError, match=r"the teacher has 300 tokens and that of the policy 259. Set .*opd_top_k"):
        distilled(four_layers(), other)
