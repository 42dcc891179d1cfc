"""Advantages of a round by its algorithm, and the critic's part of a step: values, update, explained variance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slimectl.algorithms.advantages import group_advantages, reinforce_returns, sequence_rewards, whitened
from slimectl.algorithms.kl import kl_estimate
from slimectl.algorithms.value_loss import ValueLoss, explained_variance, generalized_advantages
from slimectl.protocols import Critic
from slimectl.settings.algorithm import (
    GroupNormalized,
    Opd,
    PolicyGradient,
    Ppo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
)
from slimectl.stages.finite_check import FiniteCheck
from slimectl.types import Metrics, Sample, TrainingSample


def set_values(rows: Sequence[TrainingSample], critic: Critic) -> None:
    """Write `TrainingSample.values`: the critic's predictions before the updates of the round."""
    if rows:
        for row, values in zip(rows, critic.values(rows), strict=True):
            row.values = values


def critic_step(rows: Sequence[TrainingSample], critic: Critic, algorithm: Ppo, finite: FiniteCheck) -> Metrics:
    """Make one optimizer step over rows with loss weights, values and returns; return the metrics train/critic-…

    Raises DivergedError, before the update, if loss or gradient are not finite.
    """
    summed = finite.update(critic, ValueLoss(algorithm.value_clip), of="the critic's", outputs=critic.values)
    metrics = {f"train/critic-{name}": value for name, value in summed.items()}
    return metrics | explained(rows)


def explained(rows: Sequence[TrainingSample]) -> Metrics:
    """Return the explained variance of the returns by the values from before the round."""
    values = [torch.tensor(row.values, dtype=torch.float64) for row in rows]
    returns = [torch.tensor(row.returns, dtype=torch.float64) for row in rows]
    masks = [torch.tensor(row.weights) for row in rows]
    return {"train/critic-explained_variance": explained_variance(values, returns, masks)}


def set_advantages(
    rows: list[TrainingSample],
    samples: list[Sample],
    rewards: list[float],
    algorithm: PolicyGradient,
    *,
    compare: bool = True,
) -> Metrics:
    """Write `TrainingSample.advantages`, and `.returns` with a critic; return the reverse KL to a teacher.

    Rows have the log-probabilities, and the values, that the algorithm needs. `compare=False` skips the comparison
    of siblings: the rewards have been compared already.
    """
    masks = [_tensor(row.weights) for row in rows]
    metrics: Metrics = {}
    token_advantages = _estimate_advantages(rows, samples, rewards, masks, algorithm, compare)
    if algorithm.opd_kl_coef and rows:
        distances = [_teacher_kl(row, sample) for row, sample in zip(rows, samples, strict=True)]
        token_advantages = [
            a_T - algorithm.opd_kl_coef * d_T for a_T, d_T in zip(token_advantages, distances, strict=True)
        ]
        masked_distances = torch.cat([d_T[mask_T != 0] for d_T, mask_T in zip(distances, masks, strict=True)])
        metrics["train/opd_reverse_kl"] = float(masked_distances.mean()) if len(masked_distances) else 0.0
    if algorithm.normalize_advantages and token_advantages:
        token_advantages = whitened(token_advantages, masks)
    for row, advantages_T in zip(rows, token_advantages, strict=True):
        row.advantages = advantages_T.tolist()
    return metrics


def _estimate_advantages(
    rows: list[TrainingSample],
    samples: list[Sample],
    rewards: list[float],
    masks: list[Tensor],
    algorithm: PolicyGradient,
    compare: bool,
) -> list[Tensor]:
    """Return an advantage for every token: reward less KL penalty, against siblings, a critic or no baseline."""
    penalties = [_reference_kl(row, algorithm) for row in rows]
    if isinstance(algorithm, Opd):
        return [torch.zeros_like(mask_T) for mask_T in masks]
    if isinstance(algorithm, Ppo):
        return [
            _critic_advantages(row, reward, kl_T, mask_T, algorithm)
            for row, reward, kl_T, mask_T in zip(rows, rewards, penalties, masks, strict=True)
        ]
    if isinstance(algorithm, ReinforcePlusPlus):
        return [
            reinforce_returns(reward, kl_T, mask_T, kl_coef=algorithm.kl_coef, gamma=algorithm.gamma)
            for reward, kl_T, mask_T in zip(rewards, penalties, masks, strict=True)
        ]
    if isinstance(algorithm, ReinforcePlusPlusBaseline):
        centred = _compare_with_siblings(samples, rewards, algorithm) if compare else rewards
        return [
            advantage - algorithm.kl_coef * (torch.zeros_like(mask_T) if kl_T is None else kl_T)
            for advantage, kl_T, mask_T in zip(centred, penalties, masks, strict=True)
        ]
    penalized_rewards = [
        reward if kl_T is None else reward - algorithm.kl_coef * float((kl_T * mask_T).sum())
        for reward, kl_T, mask_T in zip(rewards, penalties, masks, strict=True)
    ]
    advantages = _compare_with_siblings(samples, penalized_rewards, algorithm) if compare else penalized_rewards
    return [advantage * torch.ones_like(mask_T) for advantage, mask_T in zip(advantages, masks, strict=True)]


def _critic_advantages(
    row: TrainingSample, reward: float, kl_T: Tensor | None, mask_T: Tensor, algorithm: Ppo
) -> Tensor:
    """Return the GAE advantages of one answer and write `TrainingSample.returns`."""
    assert row.values is not None
    values_T = _tensor(row.values)
    rewards_T = sequence_rewards(reward, kl_T, mask_T, kl_coef=algorithm.kl_coef)
    advantages_T = generalized_advantages(rewards_T, values_T, gamma=algorithm.gamma, lambd=algorithm.lambd)
    row.returns = (advantages_T + values_T).tolist()
    return advantages_T


def _compare_with_siblings(samples: list[Sample], rewards: list[float], algorithm: PolicyGradient) -> list[float]:
    """Return the advantage of each sample within its group."""
    assert algorithm.baseline != "none"
    return group_advantages(
        rewards,
        [sample.group_index for sample in samples],
        [sample.execution for sample in samples],
        baseline=algorithm.baseline,
        std_normalization=isinstance(algorithm, GroupNormalized) and algorithm.grpo_std_normalization,
        # Tokens of the policy, also those that are not trained on: a removed sample still counts in the statistics.
        lengths=[sum(sample.loss_mask or [1] * sample.response_length) for sample in samples],
    )


def _reference_kl(row: TrainingSample, algorithm: PolicyGradient) -> Tensor | None:
    """Return the k1 estimate of KL(policy || reference) at every token if it is a reward penalty, else None."""
    if not algorithm.kl_coef:
        return None
    assert row.old_log_probs is not None
    assert row.ref_log_probs is not None
    return kl_estimate(_tensor(row.old_log_probs), _tensor(row.ref_log_probs), "k1")


def _teacher_kl(row: TrainingSample, sample: Sample) -> Tensor:
    """Return the k1 estimate of KL(policy || teacher) at every token."""
    assert row.old_log_probs is not None
    assert sample.teacher_log_probs is not None
    return kl_estimate(_tensor(row.old_log_probs), _tensor(sample.teacher_log_probs), "k1")


def _tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
