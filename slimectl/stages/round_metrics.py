"""What a round looks like in numbers beyond rewards and lengths: its rows, and what [track] asks for besides."""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Iterable, Iterator, Sequence

from slimectl.algorithms.advantages import group_advantages
from slimectl.algorithms.pass_rates import pass_at_k, powers_of_two
from slimectl.settings import Settings
from slimectl.settings.algorithm import GroupNormalized, Pairwise, PolicyGradient, Sft
from slimectl.settings.run import TrackSettings
from slimectl.types import Metrics, Row, Sample, Status

LONG = 10_000
"""Characters at the end of an answer that are looked at for repetition; shorter answers have none."""

REPETITIVE = 10
"""How many times smaller zlib makes a text that says the same again and again."""


def row_metrics(rows: Sequence[Row]) -> Metrics:
    """Means (and extremes) over the tokens that are trained on: advantages, returns, values, log-probabilities.

    What not all rows have is left out: without a critic there are no values, and where a round is one step the loss
    takes the policy's own log-probabilities.
    """
    metrics: Metrics = {}
    for name in ("advantages", "returns", "values"):
        kept = _kept(rows, [getattr(row, name) for row in rows])
        if kept:
            metrics |= _mean_max_min(f"rollout/{name}", kept)
    for name, column in (("log_probs", "old_log_probs"), ("ref_log_probs", "ref_log_probs")):
        kept = _kept(rows, [getattr(row, column) for row in rows])
        if kept:
            metrics[f"rollout/{name}"] = statistics.fmean(kept)
    if {"rollout/log_probs", "rollout/ref_log_probs"} <= metrics.keys():
        metrics["rollout/kl"] = metrics["rollout/log_probs"] - metrics["rollout/ref_log_probs"]
    return metrics


def sample_counts(rows: Sequence[Row]) -> Metrics:
    """How many samples of a step have a token that is trained on, and which share of those with any response."""
    answered = sum(row.response_length > 0 for row in rows)
    valid = sum(any(row.weights) for row in rows)
    return {"train/valid_samples": float(valid), "train/valid_sample_ratio": valid / answered if answered else 0.0}


def _kept(rows: Sequence[Row], columns: Sequence[list[float] | None]) -> list[float]:
    """The values of the tokens that have a weight, of all rows; nothing if a row lacks the column."""
    if not all(column and len(column) == row.response_length for row, column in zip(rows, columns, strict=True)):
        return []
    return [
        value
        for row, column in zip(rows, columns, strict=True)
        for value, weight in zip(column or [], row.weights, strict=True)
        if weight
    ]


def _mean_max_min(name: str, values: Sequence[float]) -> Metrics:
    return {name: statistics.fmean(values), f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}


def round_metrics(samples: Sequence[Sample], rewards: Sequence[float], settings: Settings) -> Metrics:
    """Lengths, truncation, repetition and compared rewards of a round, and what [track] asks for besides.

    `rewards` has one number a sample; where fewer have one, what is made of rewards is left out.
    """
    track = settings.track
    metrics: Metrics = {
        "rollout/avg_response_length": statistics.fmean(sample.response_length for sample in samples),
        "rollout/truncated_ratio": statistics.fmean(sample.status is Status.TRUNCATED for sample in samples),
        "rollout/repetition_frac": statistics.fmean(repeats(sample.response) for sample in samples),
    }
    metrics |= _spread("rollout/prompt_len", [sample.prompt_length for sample in samples])
    if len(rewards) != len(samples):
        return metrics | asked_for("rollout/", samples, None, [], track)
    metrics["rollout/avg_reward"] = statistics.fmean(rewards)
    metrics |= compared_rewards(samples, rewards, settings.algorithm)
    right = [reward >= settings.eval.success_threshold for reward in rewards]
    if track.log_passrate:
        metrics |= pass_rates("passrate/", [sample.group_index for sample in samples], right)
    return metrics | asked_for("rollout/", samples, rewards, right, track)


def asked_for(
    prefix: str, samples: Sequence[Sample], rewards: Sequence[float] | None, right: Sequence[bool], track: TrackSettings
) -> Metrics:
    """What is counted only where [track] says so; `right` tells of each sample whether it succeeded."""
    metrics: Metrics = {}
    if track.log_multi_turn:
        metrics |= multi_turn("" if prefix == "rollout/" else prefix, samples)
    if rewards is not None and track.log_reward_category:
        metrics |= by_category(prefix, samples, rewards, track.log_reward_category)
    if rewards is not None and track.log_correct_samples:
        metrics |= of_correct(prefix, samples, right)
    return metrics


def compared_rewards(
    samples: Sequence[Sample], rewards: Sequence[float], algorithm: PolicyGradient | Pairwise | Sft
) -> Metrics:
    """Rewards as they become advantages: compared within groups where the algorithm does that."""
    alive = [(s, reward) for s, reward in zip(samples, rewards, strict=True) if s.status is not Status.FAILED]
    if not isinstance(algorithm, PolicyGradient) or not alive:
        return {}
    numbers = [reward for _, reward in alive]
    if algorithm.baseline != "none":
        numbers = group_advantages(
            numbers,
            [sample.group_index for sample, _ in alive],
            [sample.execution for sample, _ in alive],
            baseline=algorithm.baseline,
            std_normalization=isinstance(algorithm, GroupNormalized) and algorithm.grpo_std_normalization,
            lengths=[sum(sample.loss_mask or [1] * sample.response_length) for sample, _ in alive],
        )
    return _mean_max_min("rollout/rewards", numbers)


def repeats(text: str) -> bool:
    """Whether the end of a long answer says the same again and again."""
    end = text[-LONG:].encode()
    return len(text) > LONG and len(end) > REPETITIVE * len(zlib.compress(end))


def pass_rates(prefix: str, groups: Sequence[int], right: Sequence[bool]) -> Metrics:
    """Unbiased pass@k for k = 1, 2, 4, … up to the size of the smallest group; none where that is 1.

    >>> pass_rates("passrate/", [0, 0, 1, 1], [True, False, False, False])
    {'passrate/pass@1': 0.25, 'passrate/pass@2': 0.5}
    """
    members: dict[int, list[bool]] = {}
    for group, success in zip(groups, right, strict=True):
        members.setdefault(group, []).append(success)
    n = min(map(len, members.values()))
    return {
        f"{prefix}pass@{k}": statistics.fmean(pass_at_k(len(one), sum(one), k) for one in members.values())
        for k in (powers_of_two(n) if n > 1 else [])
    }


def multi_turn(prefix: str, samples: Iterable[Sample]) -> Metrics:
    """How long conversations were: all tokens after the prompt, those that the policy wrote, and its turns."""
    masks = [sample.loss_mask or [1] * sample.response_length for sample in samples]
    facts = {
        "raw_response_length": [len(mask) for mask in masks],
        "wo_obs_response_length": [sum(mask) for mask in masks],
        "round_number": [sum(b > a for a, b in zip([0, *mask], mask, strict=False)) for mask in masks],
    }
    return {
        name: value
        for fact, counts in facts.items()
        for name, value in _spread(f"{prefix}multi_turn/{fact}", counts).items()
    }


def by_category(prefix: str, samples: Sequence[Sample], rewards: Sequence[float], key: str) -> Metrics:
    """Share and mean reward of the samples of each category, which metadata has under `key`."""
    found: dict[str, list[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        found.setdefault(str(sample.metadata.get(key, "none")).replace("/", "_"), []).append(reward)
    metrics: Metrics = {}
    for name, own in sorted(found.items()):
        metrics[f"{prefix}category/{name}/share"] = len(own) / len(samples)
        metrics[f"{prefix}category/{name}/reward"] = statistics.fmean(own)
    return metrics


def of_correct(prefix: str, samples: Sequence[Sample], right: Sequence[bool]) -> Metrics:
    """How many answers are right, and how long those are."""
    lengths = [sample.response_length for sample, success in zip(samples, right, strict=True) if success]
    counted = {f"{prefix}correct_samples/count": float(len(lengths))}
    return counted | (_spread(f"{prefix}correct_samples/response_len", lengths) if lengths else {})


def _spread(name: str, values: Sequence[float]) -> Metrics:
    return {
        f"{name}/mean": statistics.fmean(values),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def round_perf(samples: Sequence[Sample], perf: Metrics, *, gpus: int) -> Iterator[tuple[str, float]]:
    """What follows from a round's times and its samples."""
    rollout_s, total_s = perf.get("perf/rollout_time"), perf.get("perf/total_time")
    lengths = [sample.response_length for sample in samples]
    if rollout_s and lengths:
        yield "perf/tokens_per_gpu_per_sec", sum(lengths) / rollout_s / max(1, gpus)
        yield "perf/longest_sample_tokens_per_sec", max(lengths) / rollout_s
    tools_s = [sample.non_generation_time for sample in samples]
    if any(tools_s):
        yield from _spread("perf/non_generation_time", tools_s).items()
    if total_s and lengths:
        yield "perf/tokens_per_sec", sum(len(sample.tokens) for sample in samples) / total_s
