"""Advantages of a round, one function per family of algorithms; the registry says which algorithm uses which.

T tokens of one answer. An estimator reads a batch and the settings of its algorithm, and returns a tensor [T] per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slimectl.algorithms.advantages import group_advantages, reinforce_returns, sequence_rewards
from slimectl.algorithms.kl import kl_estimate
from slimectl.algorithms.value_loss import generalized_advantages
from slimectl.settings.needs import AlgorithmSection
from slimectl.settings.policy_gradient import PolicyGradient
from slimectl.settings.rollout_algorithms import Ppo, ReinforcePlusPlus
from slimectl.types import Sample, TrainingSample


@dataclass
class TrainingBatch:
    """The rows of a round that are trained on, with what they came from."""

    rows: list[TrainingSample]
    executions: list[int]
    """The execution of each row; the number of its pair for preferences."""

    samples: list[Sample] = field(default_factory=list)
    """The samples of the round that are neither failed nor stale, also those of groups without signal."""

    rewards: list[float] = field(default_factory=list)
    """Their rewards, or those that a user's function gave them."""

    positions: list[int] = field(default_factory=list)
    """The position of each row's sample among them."""

    compared: bool = False
    """Rewards come from a user's function, which has compared them already."""

    reported_rewards: list[float] | None = None
    """Rewards of the whole round from that function, which metrics show in place of the samples' own."""

    normalized_rewards: list[float] = field(default_factory=list)
    """The rewards after the comparison within groups, which is made once."""


def normalize_rewards(samples: Sequence[Sample], rewards: Sequence[float], algorithm: AlgorithmSection) -> list[float]:
    """Return rewards compared within their groups by the baseline of the algorithm; as they are without a baseline."""
    if algorithm.baseline == "none":
        return list(rewards)
    return group_advantages(
        rewards,
        [sample.group_index for sample in samples],
        [sample.trajectory_id for sample in samples],
        baseline=algorithm.baseline,
        std_normalization=algorithm.std_normalization,
        # Tokens of the policy, also those that are not trained on: a removed sample still counts in the statistics.
        lengths=[sum(sample.loss_mask or [1] * sample.response_length) for sample in samples],
    )


def penalized_rewards(batch: TrainingBatch, algorithm: PolicyGradient) -> list[float]:
    """Return the compared reward of each row, less kl_coef times its divergence from the reference.

    The sum of the token-level rewards of PPO from human feedback (Ouyang et al. 2022, arXiv:2203.02155, section 3.5).
    """
    return [
        batch.normalized_rewards[i] - algorithm.kl_coef * float((_reference_kl(row) * _mask(row)).sum())
        for row, i in zip(batch.rows, batch.positions, strict=True)
    ]


def group_relative(batch: TrainingBatch, algorithm: PolicyGradient) -> list[Tensor]:
    """Return the normalized reward of each answer, less kl_coef times its divergence, at every token.

    GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2), and RLOO, OPO, MaxRL by their baselines.
    """
    advantages = [batch.normalized_rewards[i] for i in batch.positions]
    if algorithm.kl_coef:
        advantages = [
            batch.rewards[i] - algorithm.kl_coef * float((_reference_kl(row) * _mask(row)).sum())
            for row, i in zip(batch.rows, batch.positions, strict=True)
        ]
        if not batch.compared:
            advantages = normalize_rewards([batch.samples[i] for i in batch.positions], advantages, algorithm)
    return [
        torch.full((len(row.loss_weights),), advantage, dtype=torch.float64)
        for row, advantage in zip(batch.rows, advantages, strict=True)
    ]


def group_relative_tokens(batch: TrainingBatch, algorithm: PolicyGradient) -> list[Tensor]:
    """Return the normalized reward of each answer, less kl_coef times the divergence of the token itself.

    REINFORCE++ with a baseline, Hu et al. 2025, arXiv:2501.03262.
    """
    return [
        reward - algorithm.kl_coef * (_reference_kl(row) if algorithm.kl_coef else torch.zeros_like(_mask(row)))
        for row, reward in zip(batch.rows, [batch.normalized_rewards[i] for i in batch.positions], strict=True)
    ]


def reinforce(batch: TrainingBatch, algorithm: ReinforcePlusPlus) -> list[Tensor]:
    """Return the discounted return of every token (REINFORCE++, Hu et al. 2025, arXiv:2501.03262)."""
    return [
        reinforce_returns(reward, kl_T, mask_T, kl_coef=algorithm.kl_coef, gamma=algorithm.gamma)
        for reward, kl_T, mask_T in _token_inputs(batch, algorithm)
    ]


def critic_relative(batch: TrainingBatch, algorithm: Ppo) -> list[Tensor]:
    """Return generalized advantages over the values of a critic (Schulman et al. 2015, arXiv:1506.02438, eq. 16)."""
    advantages = []
    for row, (reward, kl_T, mask_T) in zip(batch.rows, _token_inputs(batch, algorithm), strict=True):
        rewards_T = sequence_rewards(reward, kl_T, mask_T, kl_coef=algorithm.kl_coef)
        values_T = torch.tensor(row.values, dtype=torch.float64)
        advantages.append(
            generalized_advantages(rewards_T, values_T, mask_T, gamma=algorithm.gamma, lambd=algorithm.lambd)
        )
    return advantages


def without_rewards(batch: TrainingBatch, algorithm: PolicyGradient) -> list[Tensor]:
    """Return zeros, from which the divergence from a teacher is taken (Agarwal et al. 2023, arXiv:2306.13649)."""
    return [torch.zeros_like(_mask(row)) for row in batch.rows]


def _token_inputs(batch: TrainingBatch, algorithm: PolicyGradient) -> list[tuple[float, Tensor | None, Tensor]]:
    """Return (reward, divergence from the reference if it is charged, mask) of each row."""
    return [
        (reward, _reference_kl(row) if algorithm.kl_coef else None, _mask(row))
        for row, reward in zip(batch.rows, [batch.rewards[i] for i in batch.positions], strict=True)
    ]


def _reference_kl(row: TrainingSample) -> Tensor:
    """Return the k1 estimate of KL(policy || reference) at every token of a row."""
    old_T, ref_T = (torch.tensor(column, dtype=torch.float64) for column in (row.old_log_probs, row.ref_log_probs))
    return kl_estimate(old_T, ref_T, "k1")


def _mask(row: TrainingSample) -> Tensor:
    return torch.tensor(row.loss_weights, dtype=torch.float64)
