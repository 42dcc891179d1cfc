"""Advantages of a round, one function per family of algorithms, from token-level rewards, returns and whitening.

T tokens of one response. The registry maps algorithms to estimators. An estimator reads a batch and the settings of its
algorithm, and returns a tensor [T] per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slimectl.algorithms.baselines import has_signal, normalize_rewards
from slimectl.algorithms.kl import kl_estimate
from slimectl.algorithms.metrics import mean_and_spread
from slimectl.algorithms.normalization import RewardMoments, clamped, share_beyond
from slimectl.algorithms.value_loss import generalized_advantages
from slimectl.settings.needs import AlgorithmSection, Need
from slimectl.settings.policy_gradient import PolicyGradient
from slimectl.settings.rollout_algorithms import Ppo, ReinforcePlusPlus
from slimectl.types import Metrics, RewardedTurn, Sample, TrainingSample

Estimator = Callable[["TrainingBatch", Any], list[Tensor]]
"""Returns the advantages of each row's tokens, [T] per row, from a batch and its algorithm's settings."""


@dataclass
class TrainingBatch:
    """The rows of a round that are trained on, and the samples and rewards they came from."""

    rows: list[TrainingSample]
    executions: list[int]
    """The execution of each row. For preferences, the index of its pair."""

    samples: list[Sample] = field(default_factory=list)
    """The samples of the round that are neither failed nor stale. Includes groups without signal."""

    rewards: list[float] = field(default_factory=list)
    """Rewards of `samples`: their own, or from a user's function."""

    positions: list[int] = field(default_factory=list)
    """The index of each row's sample in `samples`."""

    compared: bool = False
    """Whether rewards come from a user's function, which has compared them already."""

    reported_rewards: list[float] | None = None
    """Rewards of the whole round from that function. Metrics show them instead of the samples' own rewards."""

    components: dict[str, list[float | None]] = field(default_factory=dict)
    """Values of the reward's components that the algorithm compares, one per sample. None means no opinion."""

    normalized_rewards: list[float] = field(default_factory=list)
    """The rewards compared within groups, or unchanged if nothing is compared. Bounded by `reward_clip`."""

    moments: RewardMoments = field(default_factory=RewardMoments)
    """Moments of the rewards of all rounds, this one included, if the algorithm normalizes by them."""

    turns: list[list[RewardedTurn]] = field(default_factory=list)
    """The rewarded turns of each of `samples`, for algorithms that need them."""

    @property
    def row_samples(self) -> list[Sample]:
        """Return the sample of each row."""
        return [self.samples[i] for i in self.positions]

    @property
    def compared_columns(self) -> list[Sequence[float | None]]:
        """Return the numbers that are compared, one per sample: the rewards, or each of their components."""
        return list(self.components.values()) or [self.rewards]

    @property
    def rewards_differ(self) -> bool:
        """Return whether any two rewards of the round differ, or two values of a component that is compared."""
        return any(has_signal(column)[0] for column in self.compared_columns)

    @property
    def any_group_differs(self) -> bool:
        """Return whether any two responses to the same prompt have different rewards."""
        groups: dict[int, list[int]] = {}
        for i, sample in enumerate(self.samples):
            groups.setdefault(sample.group_index, []).append(i)
        return any(
            has_signal([column[i] for i in members])[0]
            for column in self.compared_columns
            for members in groups.values()
        )


def estimate_advantages(
    batch: TrainingBatch, algorithm: AlgorithmSection, estimator: Estimator
) -> tuple[list[Tensor], Metrics]:
    """Return the advantage of every token of the rows, and metrics. Rows with critic values also get their returns.

    These are the estimator's advantages, minus opd_kl_coef times the divergence from a teacher (Agarwal et al. 2023,
    arXiv:2306.13649). If the algorithm asks for it, they are whitened over the batch (Hu et al. 2025,
    arXiv:2501.03262) and then bounded.
    """
    advantages = estimator(batch, algorithm)
    metrics: Metrics = {}
    if isinstance(algorithm, PolicyGradient) and algorithm.kl_coef:
        metrics = mean_and_spread("rollout/penalized_rewards", penalized_rewards(batch, algorithm))
    if Need.CRITIC in algorithm.needs:
        for row, advantages_T in zip(batch.rows, advantages, strict=True):
            row.returns = (advantages_T + _column(row.values)).tolist()
    teacher = algorithm.teacher_options
    if teacher is not None and teacher.divergence == "token":
        divergences = [
            torch.zeros_like(mask_of(row)) if sample.teacher_log_probs is None
            else _divergence(row, sample.teacher_log_probs)
            for row, sample in zip(batch.rows, batch.row_samples, strict=True)
        ]  # fmt: skip
        taught = [row.teacher_weight > 0 for row in batch.rows]
        values = torch.cat(
            [
                kl_T[(mask_of(row) != 0) & is_taught]
                for kl_T, row, is_taught in zip(divergences, batch.rows, taught, strict=True)
            ]
        )
        metrics["train/opd_reverse_kl"] = float(values.mean()) if len(values) else 0.0
        pairs = zip(advantages, divergences, strict=True)
        weights = [teacher.kl_coef * row.teacher_weight for row in batch.rows]
        advantages = [a_T - weight * kl_T for weight, (a_T, kl_T) in zip(weights, pairs, strict=True)]
    if algorithm.whitens_advantages:
        advantages = whitened(advantages, [mask_of(row) for row in batch.rows])
    if isinstance(algorithm, PolicyGradient) and (bound := algorithm.advantage_clip) is not None:
        trained = torch.cat([a_T[mask_of(row) != 0] for a_T, row in zip(advantages, batch.rows, strict=True)])
        metrics["rollout/advantage_clip_frac"] = share_beyond(trained.tolist(), bound)
        advantages = [advantages_T.clamp(-bound, bound) for advantages_T in advantages]
    return advantages, metrics


def penalized_rewards(batch: TrainingBatch, algorithm: PolicyGradient) -> list[float]:
    """Return the compared reward of each row, minus kl_coef times its divergence from the reference.

    The sum of the token-level rewards of PPO from human feedback (Ouyang et al. 2022, arXiv:2203.02155, section 3.5).
    """
    return [
        batch.normalized_rewards[i] - algorithm.kl_coef * float((reference_kl(row) * mask_of(row)).sum())
        for row, i in zip(batch.rows, batch.positions, strict=True)
    ]


def group_relative(batch: TrainingBatch, algorithm: PolicyGradient) -> list[Tensor]:
    """Return the normalized reward of each response, minus kl_coef times its divergence, at every token.

    GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2). RLOO, OPO and MaxRL differ only in their baselines.
    """
    advantages = [batch.normalized_rewards[i] for i in batch.positions]
    if algorithm.kl_coef:
        advantages = [
            batch.rewards[i] - algorithm.kl_coef * float((reference_kl(row) * mask_of(row)).sum())
            for row, i in zip(batch.rows, batch.positions, strict=True)
        ]
        if not batch.compared:
            advantages = normalize_rewards(batch.row_samples, advantages, algorithm, batch.moments)
        advantages = clamped(advantages, algorithm.reward_clip)
    return [
        torch.full((len(row.loss_weights),), advantage, dtype=torch.float64)
        for row, advantage in zip(batch.rows, advantages, strict=True)
    ]


def group_relative_tokens(batch: TrainingBatch, algorithm: PolicyGradient) -> list[Tensor]:
    """Return the normalized reward of each response, minus kl_coef times the divergence of the token itself.

    REINFORCE++ with a baseline, Hu et al. 2025, arXiv:2501.03262.
    """
    return [
        reward - algorithm.kl_coef * (reference_kl(row) if algorithm.kl_coef else torch.zeros_like(mask_of(row)))
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
        advantages.append(
            generalized_advantages(rewards_T, _column(row.values), mask_T, gamma=algorithm.gamma, lambd=algorithm.lambd)
        )
    return advantages


def without_rewards(batch: TrainingBatch, algorithm: PolicyGradient) -> list[Tensor]:
    """Return zeros, from which the teacher divergence is subtracted later (Agarwal et al. 2023, arXiv:2306.13649)."""
    return [torch.zeros_like(mask_of(row)) for row in batch.rows]


def _token_inputs(batch: TrainingBatch, algorithm: PolicyGradient) -> list[tuple[float, Tensor | None, Tensor]]:
    """Return (reward, divergence from the reference if it is penalized, mask) of each row."""
    return [
        (reward, reference_kl(row) if algorithm.kl_coef else None, mask_of(row))
        for row, reward in zip(batch.rows, [batch.normalized_rewards[i] for i in batch.positions], strict=True)
    ]


def reference_kl(row: TrainingSample) -> Tensor:
    """Return the k1 estimate of KL(policy || reference) at every token of a row (Schulman 2020)."""
    return _divergence(row, row.ref_log_probs)


def _divergence(row: TrainingSample, log_probs: list[float] | None) -> Tensor:
    """Return the k1 estimate of KL(policy || the model of `log_probs`) at every token of a row."""
    return kl_estimate(_column(row.old_log_probs), _column(log_probs), "k1")


def mask_of(row: TrainingSample) -> Tensor:
    """Return the loss weights of a row. Before a step they are its mask."""
    return _column(row.loss_weights)


def _column(values: list[float] | None) -> Tensor:
    assert values is not None
    return torch.tensor(values, dtype=torch.float64)


VARIANCE_EPSILON = 1e-8


def discounted(rewards_T: Tensor, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma G_{t+1}, with 0 after the last token. [T] to [T]. Sutton & Barto 2018, eq. 3.9."""
    returns_T = torch.empty_like(rewards_T)
    following = rewards_T.new_zeros(())
    for t in range(len(rewards_T) - 1, -1, -1):
        following = rewards_T[t] + gamma * following
        returns_T[t] = following
    return returns_T


def sequence_rewards(reward: float, kl_T: Tensor | None, mask_T: Tensor, *, kl_coef: float) -> Tensor:
    """Return the reward of every token of one response, [T]: -kl_coef kl, plus `reward` at the last unmasked token.

    Ouyang et al. 2022, arXiv:2203.02155, eq. 2, token by token. A fully masked response gives zeros.
    """
    rewards_T = torch.zeros_like(mask_T) if kl_T is None else -kl_coef * kl_T * mask_T
    positions = mask_T.nonzero()
    if not len(positions):
        return torch.zeros_like(mask_T)
    rewards_T[positions[-1]] += reward
    return rewards_T


def reinforce_returns(reward: float, kl_T: Tensor | None, mask_T: Tensor, *, kl_coef: float, gamma: float) -> Tensor:
    """Return the discounted returns of one response, [T]. Zero where masked.

    REINFORCE++, Hu et al. 2025, arXiv:2501.03262: the returns of `sequence_rewards`. Actions are the unmasked tokens.
    Tool output between them is not a step and adds no discount.
    """
    is_action_T = mask_T != 0
    returns_T = torch.zeros_like(mask_T)
    rewards_T = sequence_rewards(reward, kl_T, mask_T, kl_coef=kl_coef)
    returns_T[is_action_T] = discounted(rewards_T[is_action_T], gamma)
    return returns_T


def whitened(values: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """Normalize each [T] over all unmasked tokens: (x - mean) rsqrt(var + 1e-8), zero where masked.

    Advantage normalization (Andrychowicz et al. 2020, arXiv:2006.05990), over a global batch as in REINFORCE++ (Hu et
    al. 2025, arXiv:2501.03262). The variance is Bessel-corrected. `values` must be a whole batch, because whitening
    parts of it gives different results. Fewer than two tokens have no scale and give zeros, as equal values do.
    """
    masked_values = torch.cat([value_T[mask_T != 0] for value_T, mask_T in zip(values, masks, strict=True)])
    if len(masked_values) < 2 or bool((masked_values == masked_values[0]).all()):
        return [torch.zeros_like(value_T) for value_T in values]
    mean, scale = masked_values.mean(), torch.rsqrt(masked_values.var() + VARIANCE_EPSILON)
    return [(value_T - mean) * scale * (mask_T != 0) for value_T, mask_T in zip(values, masks, strict=True)]
