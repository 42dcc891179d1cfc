"""The algorithms: each has a settings class, an estimator of advantages, and a loss.

To add an algorithm on rollouts, write its settings class (settings/rollout_algorithms.py) and whatever is new in it: a
surrogate (surrogates.py), an estimator of advantages (estimators.py) or a scoring pass (scoring.py), with its line in
`ALGORITHMS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from slimectl.algorithms.estimators import (
    Estimator,
    critic_relative,
    group_relative,
    group_relative_tokens,
    reinforce,
    without_rewards,
)
from slimectl.algorithms.importance_sampling import importance_weights, self_normalization
from slimectl.algorithms.losses import PolicyLoss, SftLoss
from slimectl.algorithms.preferences import LinearizedLoss
from slimectl.algorithms.scoring import ScoringPass, reference_and_teacher
from slimectl.algorithms.surrogates import SURROGATES, TokenRows
from slimectl.algorithms.turn_advantages import state_relative, turn_reinforce, turn_relative
from slimectl.algorithms.value_loss import PolicyAndValueLoss, ValueLoss
from slimectl.settings import algorithm as names
from slimectl.settings import rollout_algorithms as rollouts
from slimectl.settings.needs import AlgorithmSection
from slimectl.settings.policy_gradient import PolicyGradient
from slimectl.types import Loss, TrainingSample

COMPUTED = {"surrogate", "report_scale", "tis_scale"}
"""Fields of PolicyLoss that `policy_loss` computes. Every other field is the setting of the same name."""

LOSS_SETTINGS = {field.name for field in fields(PolicyLoss)} - COMPUTED


def policy_loss(algorithm: PolicyGradient, rows: Sequence[TrainingSample]) -> PolicyLoss:
    """Return the policy-gradient loss of a step over `rows`, which must already have loss weights."""
    surrogate = SURROGATES[algorithm.surrogate]
    return PolicyLoss(
        surrogate=surrogate(**algorithm.model_dump(include={field.name for field in fields(surrogate)})),
        report_scale=_report_scale(rows),
        tis_scale=1 / _mean_weight(rows, algorithm) if algorithm.use_tis and algorithm.tis_batch_normalize else 1.0,
        **algorithm.model_dump(include=LOSS_SETTINGS),
    )


def _report_scale(rows: Sequence[TrainingSample]) -> float:
    """Return the factor that turns a step's weighted sums into means: 1 over the sum of its loss weights."""
    total = math.fsum(weight for row in rows for weight in row.loss_weights)
    return 1 / total if total else 1.0


def _mean_weight(rows: Sequence[TrainingSample], algorithm: PolicyGradient) -> float:
    """Return the mean importance weight of a step. Its rows must have old and rollout log-probabilities.

    The self-normalized estimate of importance sampling (Owen 2013, artowen.su.domains/mc, section 9.2).
    """
    old_T = torch.tensor([value for row in rows for value in row.old_log_probs or []], dtype=torch.float64)
    rollout_T = torch.tensor([value for row in rows for value in row.rollout_log_probs or []], dtype=torch.float64)
    mask_T = torch.tensor([weight != 0 for row in rows for weight in row.loss_weights], dtype=torch.bool)
    row_T = torch.tensor([i for i, row in enumerate(rows) for _ in row.loss_weights], dtype=torch.long)
    token_rows = TokenRows(mask_T, row_T, len(rows))
    weights_T, _ = importance_weights(
        old_T,
        rollout_T,
        token_rows,
        level=algorithm.tis_level,
        mode=algorithm.tis_mode,
        low=algorithm.tis_clip_low,
        high=algorithm.tis_clip,
        veto=algorithm.tis_veto,
    )
    return self_normalization(weights_T, token_rows, level=algorithm.tis_level)


def _critic_loss(algorithm: rollouts.Ppo, rows: Sequence[TrainingSample]) -> ValueLoss:
    """Return the value loss of PPO's critic (Schulman et al. 2017, arXiv:1707.06347, eq. 9)."""
    return ValueLoss(algorithm.value_clip, _report_scale(rows))


def _joint_loss(algorithm: rollouts.Ppo, rows: Sequence[TrainingSample], loss: Loss) -> Loss:
    """Return the policy loss with the critic's added (Schulman et al. 2017, arXiv:1707.06347, eq. 9)."""
    return PolicyAndValueLoss(loss, _critic_loss(algorithm, rows), algorithm.value_coef)


def _sft_loss(algorithm: names.Sft, rows: Sequence[TrainingSample]) -> Loss:
    """Return the loss of supervised fine-tuning (Ouyang et al. 2022, arXiv:2203.02155, section 3.5)."""
    return SftLoss()


def _pair_loss(algorithm: names.Pairwise, rows: Sequence[TrainingSample]) -> Loss:
    """Return the linearized loss of pairs. The rows carry its slopes as advantages."""
    return LinearizedLoss()


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: its settings, whose `needs` list what a run must also provide, and the functions that define it."""

    settings: type[AlgorithmSection]
    loss: Callable[[Any, Sequence[TrainingSample]], Loss]
    """Makes the token loss of a step, from the settings and its rows."""

    advantages: Estimator | None = None
    """Estimates the advantage of every token of a round. None for an algorithm without advantages."""

    critic_loss: Callable[[Any, Sequence[TrainingSample]], Loss] | None = None
    """Makes the loss of a step of a separate critic."""

    joint_loss: Callable[[Any, Sequence[TrainingSample], Loss], Loss] | None = None
    """Adds the critic's loss to the policy's if the two are one model."""

    scoring: Callable[[Any], Sequence[ScoringPass]] = reference_and_teacher
    """Returns what models score before the updates of a round, from the settings.

    A pass whose model a run does not have is skipped.
    """


ALGORITHMS: dict[str, Algorithm] = {
    name: Algorithm(settings, policy_loss, group_relative)
    for name, settings in names.ALGORITHMS.items()
    if issubclass(settings, PolicyGradient)
} | {
    "reinforce_plus_plus": Algorithm(rollouts.ReinforcePlusPlus, policy_loss, reinforce),
    "reinforce_plus_plus_baseline": Algorithm(rollouts.ReinforcePlusPlusBaseline, policy_loss, group_relative_tokens),
    "ppo": Algorithm(rollouts.Ppo, policy_loss, critic_relative, _critic_loss, _joint_loss),
    "turn_grpo": Algorithm(rollouts.TurnGrpo, policy_loss, turn_relative),
    "gigpo": Algorithm(rollouts.Gigpo, policy_loss, state_relative),
    "step_reinforce": Algorithm(rollouts.StepReinforce, policy_loss, turn_reinforce),
    "opd": Algorithm(rollouts.Opd, policy_loss, without_rewards),
    "sft": Algorithm(names.Sft, _sft_loss),
    "dpo": Algorithm(names.Dpo, _pair_loss),
    "reward_model": Algorithm(names.RewardModel, _pair_loss),
}
"""Algorithms by name. The default estimator of a policy gradient compares the responses of a group."""
