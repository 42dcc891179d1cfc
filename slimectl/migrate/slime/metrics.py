"""Statistics of rewards and texts, and when periodic actions are due."""

from __future__ import annotations

import bz2
import gzip
import lzma
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slimectl.algorithms.metrics import pass_at_k, pass_k_values, rollout_metrics
from slimectl.stages.score import reward_number
from slimectl.types import Sample

_COMPRESS: dict[str, Callable[[bytes, int], bytes]] = {
    "zlib": zlib.compress,
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "lzma": lambda data, level: lzma.compress(data, preset=level),
}
REPETITION_TAIL = 10_000
"""Number of characters at the end of a text that are searched for repetition. Shorter texts count as free of it."""
REPETITION_RATIO = 10


def compute_metrics_from_samples(args: Any, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of a round's samples, without the prefix rollout/."""
    rewards = [reward_number(sample, args.reward_key) for sample in samples if not sample.has_no_reward]
    return {name.removeprefix("rollout/"): value for name, value in rollout_metrics(samples, rewards).items()}


def compute_perf_metrics_from_samples(args: Any, samples: Sequence[Sample], rollout_time: float) -> dict[str, float]:
    """Return the duration of a round in seconds, and the tokens per second of its longest response."""
    longest = max((sample.response_length for sample in samples), default=0)
    return {
        "rollout_time": rollout_time,
        "longest_sample_tokens_per_sec": longest / rollout_time if rollout_time else 0.0,
    }


def dict_add_prefix(d: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the dict with a prefix before each key."""
    return {f"{prefix}{key}": value for key, value in d.items()}


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """Return the mean pass@k over groups of `group_size` rewards. A reward of 1 is a success. Groups of one give none.

    Chen et al. 2021, arXiv:2107.03374, eq. 1. Raises ValueError if the rewards do not form whole groups.
    """
    if group_size == 1:
        return {}
    count = len(flat_rewards) // group_size if num_groups is None else num_groups
    if len(flat_rewards) != count * group_size:
        raise ValueError(f"{len(flat_rewards)} rewards are not {count} groups of {group_size}")
    successes = [
        sum(reward == 1 for reward in flat_rewards[start : start + group_size])
        for start in range(0, len(flat_rewards), group_size)
    ]
    return {
        f"pass@{k}": statistics.fmean(pass_at_k(group_size, correct, k) for correct in successes)
        for k in pass_k_values(group_size)
        if successes
    }


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Return mean, median, maximum and minimum."""
    numbers = [float(value) for value in values]
    return {
        "mean": statistics.fmean(numbers),
        "median": statistics.median(numbers),
        "max": max(numbers),
        "min": min(numbers),
    }


def compression_ratio(
    data: str | bytes, *, encoding: str = "utf-8", algorithm: str = "zlib", level: int = 9
) -> tuple[float, float]:
    """Return (original size over compressed size, percent saved). An empty text gives (inf, 0)."""
    if algorithm not in _COMPRESS:
        raise ValueError(f"no algorithm {algorithm!r}; there are {', '.join(_COMPRESS)}")
    raw = data.encode(encoding) if isinstance(data, str) else data
    if not raw:
        return float("inf"), 0.0
    size = len(_COMPRESS[algorithm](raw, level))
    return len(raw) / size, 100.0 * (1.0 - size / len(raw))


def has_repetition(text: str) -> bool:
    """Return whether the end of a long text compresses to less than a tenth of its size."""
    return len(text) > REPETITION_TAIL and compression_ratio(text[-REPETITION_TAIL:])[0] > REPETITION_RATIO


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    """Return the x value of a round in charts: its number, or the number of its first training step."""
    if args.wandb_always_use_train_step:
        return int(rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)
    return rollout_id


def should_run_periodic_action(
    rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None = None, num_rollout: int | None = None
) -> bool:
    """Return whether an action is due after round `rollout_id`, which is counted from 0 as in slime.

    It is due every `interval` rounds, at the end of an epoch, and after the last round. Without an interval it is never
    due.
    """
    if interval is None:
        return False
    done = rollout_id + 1
    return (
        done == num_rollout or done % interval == 0 or bool(num_rollout_per_epoch and done % num_rollout_per_epoch == 0)
    )
