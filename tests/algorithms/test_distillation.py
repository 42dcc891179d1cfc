"""Divergences of distributions against plain loops in float64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest
import torch

from slimectl.algorithms.distillation import Divergence, Kind, with_remainder

KINDS = get_args(Kind)


def plain_divergence(kind: str, teacher: list[float], student: list[float], beta: float) -> float:
    """The definitions, over probabilities. 0 log 0 is 0."""

    def kl(first: list[float], second: list[float]) -> float:
        return math.fsum(p * math.log(p / q) for p, q in zip(first, second, strict=True) if p)

    if kind != "jsd":
        return kl(teacher, student) if kind == "forward_kl" else kl(student, teacher)
    mixture = [beta * p + (1 - beta) * q for p, q in zip(teacher, student, strict=True)]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def coarse(probabilities: list[float], tokens: list[int]) -> list[float]:
    """The probabilities of the tokens, and of all others together."""
    return [
        *(probabilities[token] for token in tokens),
        math.fsum(probabilities) - math.fsum(map(probabilities.__getitem__, tokens)),
    ]


def logits(seed: int, rows: int = 4, vocabulary: int = 9) -> torch.Tensor:
    return 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def numeric_gradient(value: object, at: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    """Central differences of a function of one logit at a time."""
    gradient = torch.zeros_like(at)
    for place in range(at.numel()):
        ends = []
        for sign in (1, -1):
            moved = at.clone()
            moved.view(-1)[place] += sign * step
            ends.append(value(moved))  # type: ignore[operator]
        gradient.view(-1)[place] = (ends[0] - ends[1]) / (2 * step)
    return gradient


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_values_slopes_and_gradients_are_those_of_the_definition(kind: Kind, beta: float):
    divergence, teacher = Divergence(kind, beta), logits(1).log_softmax(1)

    def plain(of_student: torch.Tensor) -> float:
        pairs = zip(teacher.exp().tolist(), of_student.softmax(1).tolist(), strict=True)
        return math.fsum(plain_divergence(kind, p, q, beta) for p, q in pairs)

    student = logits(2).requires_grad_()
    log_q = student.log_softmax(1)
    terms = divergence.terms(log_q, teacher)
    assert terms.sum().item() == pytest.approx(plain(student.detach()), abs=1e-12)
    (by_log_q, by_logit) = torch.autograd.grad(terms.sum(), [log_q, student])
    torch.testing.assert_close(divergence.slopes(log_q.detach(), teacher), by_log_q, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(by_logit, numeric_gradient(plain, student.detach()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_likeliest_tokens_and_the_rest_are_one_coarser_distribution(kind: Kind):
    divergence, p = Divergence(kind, 0.3), logits(1).softmax(1)
    tokens = p.topk(3, dim=1).indices

    def plain(of_student: torch.Tensor) -> float:
        rows = zip(p.tolist(), of_student.softmax(1).tolist(), tokens.tolist(), strict=True)
        return math.fsum(plain_divergence(kind, coarse(p, top), coarse(q, top), 0.3) for p, q, top in rows)

    student = logits(2).requires_grad_()
    values = divergence.over_likeliest(student.log_softmax(1).gather(1, tokens), p.log().gather(1, tokens))
    assert values.sum().item() == pytest.approx(plain(student.detach()), abs=1e-12)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    torch.testing.assert_close(gradient, numeric_gradient(plain, student.detach()), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(gradient.sum(1), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_coarser_divergence_is_a_lower_bound_that_grows_to_the_full_one(kind: Kind):
    divergence, teacher, student = Divergence(kind), logits(1).log_softmax(1), logits(2).log_softmax(1)
    order = teacher.sort(dim=1, descending=True).indices
    bounds = [
        divergence.over_likeliest(student.gather(1, order[:, :k]), teacher.gather(1, order[:, :k])) for k in range(10)
    ]
    assert all(bool((low <= high + 1e-12).all()) for low, high in pairwise(bounds))
    assert bounds[0].tolist() == [0.0] * 4  # one bucket
    torch.testing.assert_close(bounds[9], divergence.terms(student, teacher).sum(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_without_a_token_count_for_nothing(kind: Kind):
    divergence, teacher, student = Divergence(kind), logits(1).log_softmax(1), logits(2).log_softmax(1)
    tokens = teacher.topk(2, dim=1).indices
    expected = divergence.over_likeliest(student.gather(1, tokens), teacher.gather(1, tokens))
    padded = torch.cat([teacher.gather(1, tokens), torch.full((4, 1), -torch.inf)], dim=1)
    inputs = torch.cat([student.gather(1, tokens), torch.full((4, 1), -0.1)], dim=1).requires_grad_()
    found = divergence.over_likeliest(inputs, padded)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
    (gradient,) = torch.autograd.grad(found.sum(), inputs)
    assert gradient[:, 2].tolist() == [0.0] * 4
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_is_sure_of_its_tokens_leaves_a_finite_divergence(kind: Kind):
    teacher = torch.tensor([[-1e-9, -30.0], [0.0, -40.0]])
    student = torch.tensor([[-20.0, -0.001], [0.0, -50.0]], requires_grad=True)
    values = Divergence(kind).over_likeliest(student, teacher)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    assert bool(values.isfinite().all() and gradient.isfinite().all())
    assert values[1].item() == pytest.approx(0.0, abs=1e-5)


def test_the_remainder_is_what_the_tokens_leave():
    found = with_remainder(torch.tensor([[0.5, 0.25], [0.5, 0.5]], dtype=torch.float64).log()).exp()
    assert found.tolist() == [[0.5, 0.25, 0.25], [0.5, 0.5, pytest.approx(0.0, abs=1e-15)]]


def test_near_its_ends_the_jensen_shannon_divergence_is_a_kl_divergence():
    """In TRL's convention: beta KL(teacher || student) near 0, (1 - beta) KL(student || teacher) near 1."""
    teacher, student = logits(1).log_softmax(1), logits(2).log_softmax(1)
    for beta, weight, kind in ((1e-6, 1e-6, "forward_kl"), (1 - 1e-6, 1e-6, "reverse_kl")):
        found = Divergence("jsd", beta).terms(student, teacher).sum(1) / weight
        expected = Divergence(kind).terms(student, teacher).sum(1)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
