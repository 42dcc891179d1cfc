"""Advantages of turns: returns of an attempt's turns, compared with equal turns or equal states.

T tokens of one response, K turns of one attempt, G turns that are compared with each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from statistics import fmean

import torch
from torch import Tensor

from slimectl.algorithms.baselines import group_normalized
from slimectl.algorithms.estimators import TrainingBatch, discounted, mask_of, reference_kl
from slimectl.algorithms.normalization import clamped
from slimectl.errors import RecordError
from slimectl.settings.policy_gradient import TurnCredit
from slimectl.settings.rollout_algorithms import Gigpo, TurnGrpo
from slimectl.types import RewardedTurn, TurnKey

ByTurn = Mapping[TurnKey, float]


def turn_returns(batch: TrainingBatch, algorithm: TurnCredit) -> dict[TurnKey, float]:
    """Return the discounted return of every turn: its reward plus turn_gamma times the return of the player's next one.

    The sum over later turns of Group Turn Policy Optimization (Ding et al. 2025, arXiv:2511.14846). A turn that several
    samples share counts once. `outcome_weight` times the attempt's mean reward is added to the last turn.
    """
    rewards: dict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
    outcomes: dict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
    for i, turns in enumerate(batch.turns):
        for turn in turns:
            episode = turn.key.group, turn.key.attempt, turn.key.player
            rewards[episode].setdefault(turn.key.number, turn.reward)
            outcomes[episode][i] = batch.rewards[i]
    returns: dict[TurnKey, float] = {}
    for episode, by_number in rewards.items():
        numbers = sorted(by_number)
        rewards_K = torch.tensor([by_number[number] for number in numbers], dtype=torch.float64)
        rewards_K[-1] += algorithm.outcome_weight * fmean(outcomes[episode].values())
        for number, value in zip(numbers, discounted(rewards_K, algorithm.turn_gamma).tolist(), strict=True):
            returns[TurnKey(*episode, number)] = value
    return returns


def turn_relative(batch: TrainingBatch, algorithm: TurnGrpo) -> list[Tensor]:
    """Return the normalized return of each turn at its tokens, minus kl_coef times the divergence of the token.

    Group Turn Policy Optimization (Ding et al. 2025, arXiv:2511.14846). The turns that are compared have the same
    number in the attempts of a group, or are all turns of the group, as with the process supervision of GRPO (Shao et
    al. 2024, arXiv:2402.03300, section 4.1.3), or all turns of the round.
    """
    compared_with: dict[str, Callable[[TurnKey], Hashable]] = {
        "turn": lambda key: (key.group, key.player, key.number),
        "group": lambda key: (key.group, key.player),
        "batch": lambda key: None,
    }
    returns = turn_returns(batch, algorithm)
    place = compared_with[algorithm.turn_baseline]
    advantages = compared(returns, {key: place(key) for key in returns}, std_normalization=algorithm.std_normalization)
    return _at_tokens(batch, algorithm, advantages)


def state_relative(batch: TrainingBatch, algorithm: Gigpo) -> list[Tensor]:
    """Return the normalized reward of the attempt, plus the normalized return among turns from the same state.

    GiGPO (Feng et al. 2025, arXiv:2505.10978): A = A_episode + omega A_step. The groups of A_step are the turns of all
    attempts at one prompt that start from equal states, at whatever time. A state without an equal has no step-level
    advantage. Raises RecordError if a turn has no state.
    """
    returns = turn_returns(batch, algorithm)
    states = {turn.key: (turn.key.group, turn.key.player, turn.state) for turn in _distinct(batch)}
    if unknown := next((key for key, (_, _, state) in states.items() if state is None), None):
        raise RecordError(
            f"turn {unknown.number} of group {unknown.group}: no state, which {algorithm.name} compares. Give it in "
            f"sample.turn_rewards, or use turn_grpo"
        )
    advantages = compared(returns, states, std_normalization=algorithm.std_normalization)
    steps = _at_tokens(batch, algorithm, advantages)
    return [
        algorithm.episode_reward_weight * batch.normalized_rewards[i] * (mask_of(row) != 0)
        + algorithm.step_reward_weight * steps_T
        for row, i, steps_T in zip(batch.rows, batch.positions, steps, strict=True)
    ]


def turn_reinforce(batch: TrainingBatch, algorithm: TurnCredit) -> list[Tensor]:
    """Return the discounted return of each turn at its tokens, minus kl_coef times the divergence of the token.

    REINFORCE (Sutton & Barto 2018, section 13.3) with turns as actions. Whitening over the round, as in REINFORCE++ (Hu
    et al. 2025, arXiv:2501.03262), follows.
    """
    return _at_tokens(batch, algorithm, turn_returns(batch, algorithm))


def compared(returns: ByTurn, groups: Mapping[TurnKey, Hashable], *, std_normalization: bool) -> dict[TurnKey, float]:
    """Return each return normalized within its group (GRPO, arXiv:2402.03300). A group of one gives 0."""
    members: dict[Hashable, list[TurnKey]] = defaultdict(list)
    for key in returns:
        members[groups[key]].append(key)
    advantages: dict[TurnKey, float] = {}
    for keys in members.values():
        returns_G = torch.tensor([returns[key] for key in keys], dtype=torch.float64)
        values = group_normalized(returns_G, std_normalization=std_normalization).tolist()
        advantages |= zip(keys, values, strict=True)
    return advantages


def _distinct(batch: TrainingBatch) -> list[RewardedTurn]:
    """Return the turns of a batch, each once."""
    return list({turn.key: turn for turns in reversed(batch.turns) for turn in turns}.values())


def _at_tokens(batch: TrainingBatch, algorithm: TurnCredit, advantages: ByTurn) -> list[Tensor]:
    """Return the value of each turn, bounded by reward_clip, at its trained tokens. 0 elsewhere.

    The divergence of each token from the reference is subtracted.
    """
    bounded = dict(zip(advantages, clamped(advantages.values(), algorithm.reward_clip), strict=True))
    rows = []
    for row, i in zip(batch.rows, batch.positions, strict=True):
        mask_T = mask_of(row)
        values_T = torch.zeros_like(mask_T)
        for turn in batch.turns[i]:
            values_T[turn.start : turn.end] = bounded[turn.key]
        if algorithm.kl_coef:
            values_T -= algorithm.kl_coef * reference_kl(row)
        rows.append(values_T * (mask_T != 0))
    return rows
