"""Filters of groups and samples, for rollout.dynamic_sampling_filter_path and rollout.sample_filter_path."""

from __future__ import annotations

from typing import Any

from slimectl.algorithms.baselines import has_signal
from slimectl.stages.score import component_columns, component_weights, reward_number
from slimectl.types import Sample, Status


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
