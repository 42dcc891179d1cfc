"""What the tests of distillation share: a loss, rows with a teacher's likeliest tokens, and plain loops in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from policies.policy_cases import new_policy
from policies.trie_cases import forked_rows
from torch import Tensor
from transformers import AutoModelForCausalLM

from slimectl.algorithms.distillation import Divergence
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.types import TrainingSample

TEMPERATURE = 0.7
ENDS = (Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("jsd", 0.3))


@dataclass(frozen=True)
class Distilled:
    """The divergence and a little of the log-probability, so that both gradients meet in the head."""

    divergence: Divergence
    needs_entropy: bool = True

    def __call__(self, pack: Any) -> tuple[Tensor, dict[str, Tensor]]:
        distance = (pack.weights_T * pack.divergence_T).sum()
        loss = distance - 0.1 * (pack.weights_T * (pack.logprobs_T + pack.entropy_T)).sum()
        return loss, {"divergence": distance}


def rows_to_distill() -> list[TrainingSample]:
    """Rows that share tokens with others, and one pair of rows that are the same."""
    return [row for row in forked_rows(5) if row.response_length]


def distilled_policy(folder: Path, teacher: Path | None = None, **options: Any) -> FsdpPolicy:
    """A policy at TEMPERATURE. With a teacher, it compares distributions over the full vocabulary."""
    policy = new_policy(folder, temperature=TEMPERATURE, **options)
    if teacher is not None:
        policy.set_teacher(new_policy(teacher, temperature=TEMPERATURE, trains=False))
    return policy


@dataclass(frozen=True)
class Expected:
    """What rows alone give with transformers' logits, float64 and autograd."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    top: list[list[tuple[list[int], list[float]]]]
    """The teacher's likeliest tokens and their log-probabilities, by row and token."""

    @property
    def norm(self) -> float:
        return sum(float(gradient.square().sum()) for gradient in self.gradients.values()) ** 0.5


def plain_distillation(
    folder: Path, teacher: Path, rows: Sequence[TrainingSample], divergence: Divergence, top_k: int | None, **load: Any
) -> Expected:
    """Loss, gradients and the teacher's likeliest tokens, row by row from the definitions."""
    student, frozen = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float64, **load).eval() for each in (folder, teacher)
    )
    total, distance, tops = torch.zeros((), dtype=torch.float64), 0.0, []
    for row in rows:
        tokens_1T = torch.tensor([row.tokens])

        def log_p(model: Any, tokens_1T: Tensor = tokens_1T, length: int = row.response_length) -> Tensor:
            logits_TV = model(tokens_1T[:, :-1], use_cache=False).logits[0, -length:]
            return (logits_TV / TEMPERATURE).log_softmax(-1)

        q, own = log_p(student), tokens_1T[0, -row.response_length :, None]
        with torch.no_grad():
            p = log_p(frozen)
        top = p.topk(top_k or 1, dim=1)
        tops.append(list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        logprobs_T, entropy_T = q.gather(1, own)[:, 0], -(q.exp() * q).sum(1)
        if top_k is not None:
            p, q = (torch.cat([part.gather(1, top.indices).exp(), rest(part, top.indices)], 1) for part in (p, q))
        else:
            p, q = p.exp(), q.exp()
        weights_T = torch.tensor(row.loss_weights, dtype=torch.float64)
        of_row = (weights_T * between(divergence, p, q)).sum()
        total = total + of_row - 0.1 * (weights_T * (logprobs_T + entropy_T)).sum()
        distance += of_row.item()
    total.backward()
    gradients = {name: each.grad for name, each in student.named_parameters() if each.grad is not None}
    return Expected({"loss": total.item(), "divergence": distance}, gradients, tops)


def rest(log_p_TV: Tensor, tokens_TK: Tensor) -> Tensor:
    """The probability of all other tokens."""
    return log_p_TV.exp().scatter(1, tokens_TK, 0.0).sum(1, keepdim=True)


def between(divergence: Divergence, p: Tensor, q: Tensor) -> Tensor:
    """The divergence of each row of probabilities, from its definition."""

    def kl(first: Tensor, second: Tensor) -> Tensor:
        return (first * (first / second).log()).sum(1)

    if divergence.kind != "jsd":
        return kl(p, q) if divergence.kind == "forward_kl" else kl(q, p)
    mixture = divergence.beta * p + (1 - divergence.beta) * q
    return divergence.beta * kl(p, mixture) + (1 - divergence.beta) * kl(q, mixture)


def with_likeliest(rows: Sequence[TrainingSample], teacher: Any, k: int) -> list[TrainingSample]:
    """Give the rows the likeliest tokens of a teacher."""
    for row, lists in zip(rows, teacher.top_log_probs(rows, k), strict=True):
        row.teacher_top_log_probs = lists
    return list(rows)


def assert_named(rows: Sequence[TrainingSample], expected: Expected, *, atol: float = 2e-5) -> None:
    """Assert that the rows have the teacher's likeliest tokens."""
    for row, tops in zip(rows, expected.top, strict=True):
        assert row.teacher_top_log_probs is not None
        for pairs, (tokens, log_probs) in zip(row.teacher_top_log_probs, tops, strict=True):
            assert [token for token, _ in pairs] == tokens
            torch.testing.assert_close(
                torch.tensor([value for _, value in pairs]), torch.tensor(log_probs), rtol=0, atol=atol
            )
