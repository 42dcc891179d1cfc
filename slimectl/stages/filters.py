"""Filters of groups and samples: two to be named in settings, and the masks that [algorithm] switches on."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from slimectl.algorithms.baselines import attempt_rewards, has_signal
from slimectl.settings.policy_gradient import PolicyGradient
from slimectl.stages.score import component_columns, component_weights, reward_number
from slimectl.types import Metrics, Sample, Status

if TYPE_CHECKING:
    from slimectl.algorithms.estimators import TrainingBatch


def nonzero_std(args: Any, samples: list[Sample]) -> tuple[bool, str]:
    """Keep groups whose rewards differ: DAPO's dynamic sampling (arXiv:2503.14476, eq. 11).

    Samples without a reward (score.none_reward) are not compared. With gdpo, a component of the rewards must differ.
    """
    rewarded = [sample for sample in samples if not sample.has_no_reward]
    columns = component_columns(rewarded, component_weights(args.algorithm, args.score)).values()
    rewards = [reward_number(sample, args.score.reward_key) for sample in rewarded]
    return max((has_signal(column) for column in columns or [rewards]), key=lambda signal: signal[0])


def leave_out_truncated(args: Any, data: list[list[Sample]]) -> None:
    """Do not train on truncated responses. They still count in the baseline of their group.

    Equivalent to TRL's mask_truncated_completions and ROLL's max_len_mask.
    """
    for group in data:
        for sample in group:
            sample.remove_sample |= sample.status == Status.TRUNCATED


def mask_samples(batch: TrainingBatch, algorithm: PolicyGradient, success_threshold: float) -> Metrics:
    """Set the loss mask of excluded responses to 0, and return the share of rows that each mask excludes.

    Excluded responses have already been compared with the others, so the baselines of their groups do not change. They
    count in the size of a step like every fully masked row (algorithms/reductions.py).
    """
    samples, rewards = batch.row_samples, [row.reward or 0.0 for row in batch.rows]
    excluded: dict[str, list[bool]] = {}
    if algorithm.max_len_mask:
        excluded["max_len"] = [sample.status is Status.TRUNCATED for sample in samples]
    if algorithm.difficulty_mask:
        by_group: dict[int, list[float]] = {}
        for (group, _), reward in attempt_rewards(samples, rewards).items():
            by_group.setdefault(group, []).append(reward)
        low, high = algorithm.difficulty_low_threshold, algorithm.difficulty_high_threshold
        # A single response does not tell how difficult its prompt is.
        outside = {group for group, scores in by_group.items() if len(scores) > 1 and not low < fmean(scores) < high}
        excluded["difficulty"] = [sample.group_index in outside for sample in samples]
    if (limit := algorithm.error_max_len_threshold) is not None:
        excluded["error_len"] = [
            reward < success_threshold and sample.response_length >= limit
            for sample, reward in zip(samples, rewards, strict=True)
        ]
    for row, *masks in zip(batch.rows, *excluded.values(), strict=True):
        if any(masks):
            row.loss_weights = [0.0] * row.response_length
    return {f"rollout/masked/{name}": fmean(masks) for name, masks in excluded.items() if masks}
