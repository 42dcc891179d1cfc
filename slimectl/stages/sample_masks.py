"""Masks of whole responses that are not trained on: truncated, too easy or too hard, or long and wrong."""

from __future__ import annotations

from statistics import fmean

from slimectl.algorithms.baselines import attempt_rewards
from slimectl.algorithms.estimators import TrainingBatch
from slimectl.settings.policy_gradient import PolicyGradient
from slimectl.types import Metrics, Status


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
        outside = {group for group, each in by_group.items() if len(each) > 1 and not low < fmean(each) < high}
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
