"""Last pass over a round: metrics of its samples and rows, and optional metrics that [track] enables."""

from __future__ import annotations

import statistics
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from slimectl.algorithms.metrics import (
    mean_and_spread,
    pass_at_k,
    pass_k_values,
    response_metrics,
    rollout_metrics,
    standard_deviation,
)
from slimectl.data.turn_rewards import numbered_turns
from slimectl.rewards import ComponentValues
from slimectl.settings import Settings
from slimectl.settings.run import TrackSettings
from slimectl.settings.score import ScoreSettings
from slimectl.stages.score import reward_number
from slimectl.types import Metrics, Sample, Status, TrainingSample, TurnKey

if TYPE_CHECKING:
    from slimectl.algorithms.estimators import TrainingBatch

LONG = 10_000
"""Number of characters at the end of a response that are checked for repetition. Shorter responses are not checked."""

REPETITIVE = 10
"""zlib compression ratio above which a text counts as repetitive."""

REPORTED_TURNS = 16
"""Number of turns whose mean rewards are metrics of their own."""


def batch_metrics(samples: Sequence[Sample], batch: TrainingBatch, settings: Settings) -> Metrics:
    """Return the metrics of a round's samples and their rows, before the round's first step."""
    rewards = round_rewards(samples, batch, settings.score)
    details = round_metrics(samples, rewards, batch.normalized_rewards, settings) | row_metrics(batch.rows)
    details |= component_metrics("rollout/", samples, settings.score.reward_key)
    return rollout_metrics(samples, rewards) | details | turn_metrics(samples)


def round_rewards(samples: Sequence[Sample], batch: TrainingBatch, settings: ScoreSettings) -> list[float]:
    """Return the rewards that the metrics of a round describe. A function of the user may report others."""
    if batch.reported_rewards is not None:
        return batch.reported_rewards
    return [reward_number(sample, settings.reward_key) for sample in samples if sample.reward is not None]


def row_metrics(rows: Sequence[TrainingSample]) -> Metrics:
    """Return means (and extremes) over the trained tokens: advantages, returns, values, log-probabilities.

    A column that some row lacks is omitted. Without a critic, rows have no values. If a round is one step, they have
    no old log-probabilities, because the loss uses the policy's current ones.
    """
    columns: dict[str, list[float]] = {}
    rows = [row for row in rows if row.response_length]
    for name in ("advantages", "returns", "values", "old_log_probs", "ref_log_probs"):
        if all(len(getattr(row, name) or ()) == row.response_length for row in rows):
            pairs = (zip(getattr(row, name), row.loss_weights, strict=True) for row in rows)
            columns[name] = [value for pair in pairs for value, weight in pair if weight]
    metrics: Metrics = {}
    for name in ("advantages", "returns", "values"):
        if columns.get(name):
            metrics |= mean_and_spread(f"rollout/{name}", columns[name])
    for name, column in (("log_probs", "old_log_probs"), ("ref_log_probs", "ref_log_probs")):
        if columns.get(column):
            metrics[f"rollout/{name}"] = statistics.fmean(columns[column])
    if {"rollout/log_probs", "rollout/ref_log_probs"} <= metrics.keys():
        metrics["rollout/kl"] = metrics["rollout/log_probs"] - metrics["rollout/ref_log_probs"]
    return metrics


def round_metrics(
    samples: Sequence[Sample], rewards: Sequence[float], normalized_rewards: Sequence[float], settings: Settings
) -> Metrics:
    """Return lengths, truncation, repetition and normalized rewards of a round, and the metrics enabled by [track].

    `rewards` has one number per sample with a reward. If it has fewer, metrics of rewards are omitted.
    """
    track = settings.track
    metrics: Metrics = {
        "rollout/avg_response_length": statistics.fmean(sample.response_length for sample in samples),
        "rollout/truncated_ratio": statistics.fmean(sample.status is Status.TRUNCATED for sample in samples),
        "rollout/repetition_frac": statistics.fmean(repeats(sample.response) for sample in samples),
    }
    metrics |= _statistics("rollout/prompt_len", [sample.prompt_length for sample in samples])
    metrics |= _grading_failures(samples)
    details = track.log_multi_turn or track.log_reward_category or track.log_correct_samples
    rewarded = [sample for sample in samples if not sample.has_no_reward]
    has_rewards = bool(rewards) and len(rewards) == len(rewarded)
    metrics |= response_metrics(rewarded, rewards) if has_rewards else response_metrics(samples, [])
    if not has_rewards:
        return metrics | optional_metrics("rollout/", samples, None, [], track) if details else metrics
    metrics["rollout/avg_reward"] = statistics.fmean(rewards)
    metrics |= mean_and_spread("rollout/rewards", normalized_rewards) if normalized_rewards else {}
    right = [reward >= settings.eval.success_threshold for reward in rewards]
    if track.log_passrate:
        metrics |= pass_rates("passrate/", [sample.group_index for sample in rewarded], right)
    return metrics | optional_metrics("rollout/", samples, rewards, right, track) if details else metrics


def _grading_failures(samples: Sequence[Sample]) -> Metrics:
    """Return the shares of samples whose grading timed out, and that have no reward. A share of 0 is omitted."""
    shares = {
        "rollout/reward_timeouts": statistics.fmean("reward_error" in sample.metadata for sample in samples),
        "rollout/no_reward": statistics.fmean(sample.has_no_reward for sample in samples),
    }
    return {name: share for name, share in shares.items() if share}


def component_metrics(prefix: str, samples: Sequence[Sample], reward_key: str | None) -> Metrics:
    """Return mean and deviation of each component of the samples' rewards that several prompts share."""
    values = ComponentValues(reward_key)
    for sample in samples:
        values.add(sample.reward, prompt=sample.group_index)
    metrics: Metrics = {}
    for name, numbers in values.by_name().items():
        metric = f"{prefix}reward/{name.replace('/', '_')}"
        metrics |= {metric: statistics.fmean(numbers), f"{metric}/std": standard_deviation(numbers)}
    return metrics


def optional_metrics(
    prefix: str, samples: Sequence[Sample], rewards: Sequence[float] | None, right: Sequence[bool], track: TrackSettings
) -> Metrics:
    """Return the metrics that [track] enables. `right` is true for each sample with a reward that succeeded."""
    metrics: Metrics = {}
    rewarded = [sample for sample in samples if not sample.has_no_reward]
    if track.log_multi_turn:
        metrics |= multi_turn("" if prefix == "rollout/" else prefix, samples)
    if rewards is not None and track.log_reward_category:
        metrics |= by_category(prefix, rewarded, rewards, track.log_reward_category)
    if rewards is not None and track.log_correct_samples:
        metrics |= correct_only(prefix, rewarded, right)
    return metrics


def repeats(text: str) -> bool:
    """Return whether the end of a long response repeats itself."""
    end = text[-LONG:].encode()
    return len(text) > LONG and len(end) > REPETITIVE * len(zlib.compress(end))


def pass_rates(prefix: str, groups: Sequence[int], right: Sequence[bool]) -> Metrics:
    """Return unbiased pass@k for k = 1, 2, 4, … up to the size of the smallest group, or nothing if that is 1.

    >>> pass_rates("passrate/", [0, 0, 1, 1], [True, False, False, False])
    {'passrate/pass@1': 0.25, 'passrate/pass@2': 0.5}
    """
    members: dict[int, list[bool]] = {}
    for group, success in zip(groups, right, strict=True):
        members.setdefault(group, []).append(success)
    n = min(map(len, members.values()))
    return {
        f"{prefix}pass@{k}": statistics.fmean(
            pass_at_k(len(successes), sum(successes), k) for successes in members.values()
        )
        for k in (pass_k_values(n) if n > 1 else [])
    }


def turn_metrics(samples: Sequence[Sample]) -> Metrics:
    """Return the mean reward of turns by their number, and the number and sizes of the groups of equal states.

    A turn that several samples share counts once. Groups are of one prompt. Without turn rewards it returns nothing.
    """
    rewards: dict[TurnKey, float] = {}
    states: dict[TurnKey, tuple[int, int, str]] = {}
    for _, turns in numbered_turns(sample for sample in samples if sample.status is not Status.FAILED):
        for key, entry in turns:
            rewards[key] = float(entry["reward"])
            if entry.get("state") is not None:
                states[key] = key.group, key.player, entry["state"]
    by_number: dict[int, list[float]] = {}
    for key, reward in rewards.items():
        by_number.setdefault(key.number, []).append(reward)
    metrics = {
        f"rollout/turn_reward/{number}": statistics.fmean(values)
        for number, values in sorted(by_number.items())
        if number < REPORTED_TURNS
    }
    if states:
        sizes = list(Counter(states.values()).values())
        metrics |= {"rollout/state_groups": float(len(sizes))} | _statistics("rollout/state_group_size", sizes)
    return metrics


def multi_turn(prefix: str, samples: Iterable[Sample]) -> Metrics:
    """Return conversation lengths: all tokens after the prompt, tokens written by the policy, and turns."""
    masks = [sample.loss_mask or [1] * sample.response_length for sample in samples]
    columns = {
        "raw_response_length": [len(mask) for mask in masks],
        "wo_obs_response_length": [sum(mask) for mask in masks],
        "round_number": [sum(b > a for a, b in zip([0, *mask], mask, strict=False)) for mask in masks],
    }
    return {
        name: value
        for column, counts in columns.items()
        for name, value in _statistics(f"{prefix}multi_turn/{column}", counts).items()
    }


def by_category(prefix: str, samples: Sequence[Sample], rewards: Sequence[float], key: str) -> Metrics:
    """Return share and mean reward of each category of samples. The category is `key` in the metadata or prompt row."""
    rewards_by_category: dict[str, list[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        category = sample.metadata.get(key, sample.extra.get(key, "none"))
        rewards_by_category.setdefault(str(category).replace("/", "_"), []).append(reward)
    metrics: Metrics = {}
    for name, category_rewards in sorted(rewards_by_category.items()):
        metrics[f"{prefix}category/{name}/share"] = len(category_rewards) / len(samples)
        metrics[f"{prefix}category/{name}/reward"] = statistics.fmean(category_rewards)
    return metrics


def correct_only(prefix: str, samples: Sequence[Sample], right: Sequence[bool]) -> Metrics:
    """Return the number of correct responses and their lengths."""
    lengths = [sample.response_length for sample, success in zip(samples, right, strict=True) if success]
    counted = {f"{prefix}correct_samples/count": float(len(lengths))}
    return counted | (_statistics(f"{prefix}correct_samples/response_len", lengths) if lengths else {})


def _statistics(name: str, values: Sequence[float]) -> Metrics:
    return {
        f"{name}/mean": statistics.fmean(values),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def round_perf(samples: Sequence[Sample], perf: Metrics, *, gpus: int) -> Iterator[tuple[str, float]]:
    """Yield the throughput metrics of a round from its times and samples."""
    rollout_s, total_s = perf.get("perf/rollout_time"), perf.get("perf/total_time")
    lengths = [sample.response_length for sample in samples]
    if rollout_s and lengths:
        yield "perf/tokens_per_gpu_per_sec", sum(lengths) / rollout_s / max(1, gpus)
        yield "perf/longest_sample_tokens_per_sec", max(lengths) / rollout_s
    tools_s = [sample.non_generation_time for sample in samples]
    if any(tools_s):
        yield from _statistics("perf/non_generation_time", tools_s).items()
    if total_s and lengths:
        yield "perf/tokens_per_sec", sum(len(sample.tokens) for sample in samples) / total_s
