"""Metrics of a round of samples: rewards, lengths, failures, speculative decoding."""

from __future__ import annotations

import math
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from slimectl.types import Metrics, Sample, Status


def standard_deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation, which divides by the number of values.

    >>> standard_deviation([1.0, 1.0, 3.0, 3.0])
    1.0
    """
    mean = fmean(values)
    return math.sqrt(fmean((value - mean) ** 2 for value in values))


def mean_and_spread(name: str, values: Sequence[float]) -> Metrics:
    """Return the mean of values under `name`, and their deviation, maximum and minimum under names below it."""
    spread = {"std": standard_deviation(values), "max": float(max(values)), "min": float(min(values))}
    return {name: fmean(values), **{f"{name}/{part}": value for part, value in spread.items()}}


QUANTILES = (10, 25, 50, 75, 90)
"""Percentiles of a round's rewards."""


def quantiles(name: str, values: Sequence[float]) -> Metrics:
    """Return the percentiles of values under names below `name`, with linear interpolation as in numpy.

    >>> quantiles("reward", [0.0, 1.0, 2.0, 3.0, 4.0])["reward/p90"]
    3.6
    """
    ordered, metrics = sorted(values), Metrics()
    for percentile in QUANTILES:
        place = (len(ordered) - 1) * percentile / 100
        below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
        metrics[f"{name}/p{percentile}"] = below + (above - below) * (place % 1)
    return metrics


def rollout_metrics(samples: Sequence[Sample], rewards: Sequence[float]) -> Metrics:
    """Return reward, length, truncation and failure metrics of a round. `rewards` has an entry per scored sample."""
    lengths = [sample.response_length for sample in samples]
    metrics = {
        "rollout/response_len/mean": statistics.fmean(lengths),
        "rollout/response_len/median": float(statistics.median(lengths)),
        "rollout/response_len/max": float(max(lengths)),
        "rollout/response_len/min": float(min(lengths)),
        "rollout/truncation_rate": statistics.fmean(sample.status is Status.TRUNCATED for sample in samples),
    }
    if rewards:
        metrics["rollout/raw_reward"] = statistics.fmean(rewards)
        metrics["rollout/max_reward"] = max(rewards)
        metrics["rollout/min_reward"] = min(rewards)
        metrics["rollout/std_reward"] = standard_deviation(rewards)
        metrics |= quantiles("rollout/reward_quantiles", rewards)
    log_probs = [
        p for s in samples if s.rollout_log_probs for p, m in zip(s.rollout_log_probs, s.mask(), strict=True) if m
    ]
    if log_probs:
        metrics["rollout/rollout_log_probs"] = statistics.fmean(log_probs)
    if any(sample.status is Status.FAILED for sample in samples):
        metrics |= count_failures("rollout/", samples)
    prompts = sum(info["total_prompt_tokens"] for s in samples if (info := s.prefix_cache_info))
    if prompts:
        cached = sum(info["cached_tokens"] for s in samples if (info := s.prefix_cache_info))
        metrics["rollout/prefix_cache_hit_rate"] = cached / prompts
    metrics |= agent_metrics(samples) | environment_metrics(samples)
    metrics |= _speculation([s.spec_info for s in samples if s.spec_info])
    return metrics


AGENT_MEANS = {"turn_count": "turns", "tool_calls": "tool_calls", "refused_requests": "refused_requests",
               "timed_out": "timed_out"}  # fmt: skip
"""Numbers in metadata.agent, with the metrics that are their means."""


def agent_metrics(samples: Sequence[Sample]) -> Metrics:
    """Return means over program attempts (`rollout.agent`). If an attempt has several branches, the first counts."""
    attempts = {_attempt(sample): sample.metadata["agent"] for sample in reversed(samples) if _has_report(sample)}
    if not attempts:
        return {}
    reports = list(attempts.values())
    means = {
        f"rollout/agent/{metric}": sum(float(report.get(name, 0)) for report in reports) / len(reports)
        for name, metric in AGENT_MEANS.items()
    }
    failed = sum(report["exit_code"] != 0 or not report["turn_count"] for report in reports)
    return means | {"rollout/agent/failed": failed / len(reports)}


ENVIRONMENT_MEANS = ("turns", "tool_calls", "errors", "failures", "timeouts")
"""Numbers in metadata.env whose means are metrics."""


def environment_metrics(samples: Sequence[Sample]) -> Metrics:
    """Return means over episodes (`rollout.env`), and the mean reward per turn."""
    episodes: dict[tuple[int, int], Mapping[str, Any]] = {}
    turn_rewards: list[float] = []
    for sample in samples:
        report = sample.metadata.get("env")
        if isinstance(report, Mapping) and "turns" in report:
            episodes.setdefault(_attempt(sample), report)
            turn_rewards += [reward for reward in report.get("rewards", ()) if isinstance(reward, int | float)]
    if not episodes:
        return {}
    metrics = {
        f"rollout/env/{name}": fmean(float(report.get(name, 0)) for report in episodes.values())
        for name in ENVIRONMENT_MEANS
    }
    return metrics | ({"rollout/env/turn_reward": fmean(turn_rewards)} if turn_rewards else {})


def _attempt(sample: Sample) -> tuple[int, int]:
    return sample.group_index, sample.trajectory_id


def _has_report(sample: Sample) -> bool:
    report = sample.metadata.get("agent")
    return isinstance(report, dict) and {"exit_code", "turn_count"} <= report.keys()


NGRAM, NGRAM_WINDOW = 4, 256
"""Length of the n-grams that are counted as repeated, and the last tokens of a response that are searched."""


def response_metrics(samples: Sequence[Sample], rewards: Sequence[float]) -> Metrics:
    """Return how alike the responses of a round are: to each other, in themselves, and how rewards follow lengths.

    `rewards` has an entry per sample. Without it, or without groups of two, the metrics of groups are omitted.
    """
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group_index, []).append(i)
    members = [group for group in groups.values() if len(group) > 1]
    metrics: Metrics = {"rollout/ngram_repetition": repeated_ngrams([_response_end(sample) for sample in samples])}
    if members:
        repeats = sum(_duplicates([samples[i].response for i in group]) for group in members)
        metrics["rollout/duplicate_ratio"] = repeats / sum(map(len, members))
        if len(rewards) == len(samples):
            pairs = [[(float(samples[i].response_length), rewards[i]) for i in group] for group in members]
            metrics["rollout/length_reward_correlation"] = correlation_within(pairs)
    return metrics


def _response_end(sample: Sample) -> Sequence[int]:
    return sample.tokens[max(sample.prompt_length, len(sample.tokens) - NGRAM_WINDOW) :]


def _duplicates(responses: Sequence[str]) -> int:
    """Return how many responses of a group equal another one.

    >>> _duplicates(["a", "b", "a"])
    2
    """
    return sum(count for count in Counter(responses).values() if count > 1)


def repeated_ngrams(sequences: Sequence[Sequence[int]], n: int = NGRAM) -> float:
    """Return the share of the n-grams of all sequences that occurred before in their sequence.

    seq-rep-n of Welleck et al. 2019, arXiv:1908.04319, over all sequences together.

    >>> repeated_ngrams([[1, 2, 1, 2, 1, 2]], n=2)  # 12 21 12 21 12, of which three occurred before
    0.6
    """
    total = distinct = 0
    for tokens in sequences:
        if len(tokens) < n:
            continue
        ngrams = list(zip(*(tokens[start:] for start in range(n)), strict=False))
        total, distinct = total + len(ngrams), distinct + len(set(ngrams))
    return 1 - distinct / total if total else 0.0


def correlation_within(groups: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return the correlation of the pairs' two values, each minus its mean in the group. Without variation it is 0.

    >>> correlation_within([[(1.0, 5.0), (2.0, 6.0)], [(7.0, 0.0), (9.0, 2.0)]])
    1.0
    """
    x_squares = y_squares = products = 0.0
    for pairs in groups:
        xs, ys = zip(*pairs, strict=True)
        x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
        centred = [(x - x_mean, y - y_mean) for x, y in pairs]
        x_squares += sum(x * x for x, _ in centred)
        y_squares += sum(y * y for _, y in centred)
        products += sum(x * y for x, y in centred)
    spread = math.sqrt(x_squares * y_squares)
    return products / spread if spread else 0.0


def count_failures(prefix: str, samples: Sequence[Sample]) -> Metrics:
    """Count failed attempts by exception. Returns no metrics if none failed."""
    failures = Counter(_category(sample) for sample in samples if sample.status is Status.FAILED)
    return {f"{prefix}error/{name}": float(count) for name, count in sorted(failures.items())}


def _speculation(infos: Sequence[Mapping[str, int]]) -> Metrics:
    """Return metrics of speculative decoding: tokens per forward pass, and the share of accepted draft tokens."""
    passes = sum(info.get("spec_verify_ct", 0) for info in infos)
    drafted = sum(info.get("spec_draft_token_num", 0) for info in infos)
    metrics: Metrics = {}
    if passes:
        metrics["rollout/spec_accept_length"] = sum(info["completion_token_num"] for info in infos) / passes
    if drafted:
        metrics["rollout/spec_accept_rate"] = sum(info.get("spec_accept_token_num", 0) for info in infos) / drafted
    return metrics


def zero_std_groups(rewards: Sequence[Sequence[float]]) -> Metrics:
    """Count groups whose rewards are all equal, by their common reward."""
    counts = Counter(group[0] for group in rewards if len(group) > 1 and min(group) == max(group))
    return {f"rollout/zero_std/count_{value:g}": float(count) for value, count in sorted(counts.items())}


def _category(sample: Sample) -> str:
    return str(sample.metadata.get("error", "unknown")).partition(":")[0]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that k of n attempts, of which c succeeded, include a success: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, arXiv:2107.03374, eq. 1. Unbiased, and exact in integers.

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} successes in {n} attempts: needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_k_values(n: int) -> list[int]:
    """Return the values of k for pass@k: 1, 2, 4, ... up to n.

    >>> pass_k_values(6)
    [1, 2, 4]
    """
    return [1 << exponent for exponent in range(max(n, 0).bit_length())]


def majority_at_n(
    answers: Sequence[str | None], successes: Sequence[bool], same: Callable[[str, str], bool] = operator.eq
) -> float:
    """Return the success of the most frequent answer (Wang et al. 2022, arXiv:2203.11171). One success per attempt.

    >>> majority_at_n(["7", "7", "3", None], [True, True, False, False])
    1.0

    Attempts without an answer (None) do not vote. If no attempt has an answer, the result is 0. Tied answers give the
    mean of their successes, so the order of attempts does not matter. Answers that are the `same` vote together: by
    default equal strings, or answers that a verifier considers equal.

    Raises ValueError if the numbers of answers and successes differ.
    """
    if len(answers) != len(successes):
        raise ValueError(f"{len(answers)} answers for {len(successes)} successes")
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, success in zip(answers, successes, strict=True):
        if answer is not None:
            spelling = (
                answer if answer in votes else next((earlier for earlier in votes if same(earlier, answer)), answer)
            )
            votes[spelling].append(success)
    if not votes:
        return 0.0
    max_votes = max(map(len, votes.values()))
    return fmean(fmean(results) for results in votes.values() if len(results) == max_votes)
