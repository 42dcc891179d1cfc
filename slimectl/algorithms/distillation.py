"""Divergences between the distributions of a teacher and of the policy, over all tokens or over the likeliest ones.

C positions · B tokens of the vocabulary, or buckets · R response tokens · K likeliest tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["forward_kl", "reverse_kl", "jsd"]

UNUSED = -1e4
"""Log-probability of an entry without a token. Its probability is 0, and unlike -inf it has a gradient."""


@dataclass(frozen=True)
class Divergence:
    """A divergence of the policy q from the teacher p, to be minimised.

    - forward_kl: KL(p || q)
    - reverse_kl: KL(q || p)
    - jsd: beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q

    GKD, Agarwal et al. 2023, arXiv:2306.13649, eq. 1 and 2. beta has the meaning that it has in TRL: near 0, jsd is
    beta KL(p || q), and near 1 it is (1 - beta) KL(q || p). In TRL, beta 0 and 1 select these two themselves.
    """

    kind: Kind
    beta: float = 0.5

    def terms(self, student_CB: Tensor, teacher_CB: Tensor) -> Tensor:
        """Return terms [C, B] whose sum over B is the divergence, from log-probabilities."""
        if self.kind == "forward_kl":
            return teacher_CB.exp() * (teacher_CB - student_CB)
        if self.kind == "reverse_kl":
            return student_CB.exp() * (student_CB - teacher_CB)
        mixture_CB = self._mixture(student_CB, teacher_CB)
        of_teacher_CB = teacher_CB.exp() * (teacher_CB - mixture_CB)
        return self.beta * of_teacher_CB + (1 - self.beta) * student_CB.exp() * (student_CB - mixture_CB)

    def slopes(self, student_CB: Tensor, teacher_CB: Tensor) -> Tensor:
        """Return the derivative [C, B] of the divergence by each log-probability of the policy."""
        if self.kind == "forward_kl":
            return teacher_CB.exp().neg_()
        if self.kind == "reverse_kl":
            return (student_CB - teacher_CB).add_(1.0).mul_(student_CB.exp())
        difference_CB = student_CB - self._mixture(student_CB, teacher_CB)
        return difference_CB.mul_(student_CB.exp()).mul_(1 - self.beta)

    def over_likeliest(self, student_RK: Tensor, teacher_RK: Tensor) -> Tensor:
        """Return the divergence [R] over the teacher's likeliest tokens and one bucket with all the others.

        Both have the log-probabilities of the same tokens. -inf for the teacher marks an entry without a token. Joining
        tokens never increases a divergence, so this is a lower bound of the full one, and 0 where the two agree.
        """
        is_used_RK = teacher_RK > -torch.inf
        student_RK, teacher_RK = (part.masked_fill(~is_used_RK, UNUSED) for part in (student_RK, teacher_RK))
        return self.terms(with_remainder(student_RK), with_remainder(teacher_RK)).sum(1)

    def _mixture(self, student_CB: Tensor, teacher_CB: Tensor) -> Tensor:
        """Return the logarithm of beta p + (1 - beta) q."""
        return torch.logaddexp(teacher_CB + math.log(self.beta), student_CB + math.log1p(-self.beta))


def with_remainder(logprobs_RK: Tensor) -> Tensor:
    """Append the log-probability of all other tokens, [R, K + 1].

    It is at least the rounding error of a probability, so that a divergence stays finite if nothing remains. The sum is
    in float64, because a small remainder of a float32 sum is rounding.
    """
    rest_R1 = 1.0 - logprobs_RK.double().exp().sum(1, keepdim=True)
    rest_R1 = rest_R1.clamp(min=torch.finfo(logprobs_RK.dtype).eps)
    return torch.cat([logprobs_RK, rest_R1.log().to(logprobs_RK.dtype)], dim=1)
