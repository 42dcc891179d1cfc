"""Metrics of a round of samples: rewards, lengths, failures, speculative decoding."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from slimectl.types import Metrics, Sample, Status


def rollout_metrics(samples: Sequence[Sample], rewards: Sequence[float]) -> Metrics:
    """Return reward, length, truncation and failure metrics of a round; `rewards` are of samples that have one."""
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
    log_probs = [
        p for s in samples if s.rollout_log_probs for p, m in zip(s.rollout_log_probs, s.mask(), strict=True) if m
    ]
    if log_probs:
        metrics["rollout/rollout_log_probs"] = statistics.fmean(log_probs)
    metrics |= count_failures("rollout/", samples)
    prompts = sum(info["total_prompt_tokens"] for s in samples if (info := s.prefix_cache_info))
    if prompts:
        cached = sum(info["cached_tokens"] for s in samples if (info := s.prefix_cache_info))
        metrics["rollout/prefix_cache_hit_rate"] = cached / prompts
    metrics |= _speculation([s.spec_info for s in samples if s.spec_info])
    return metrics


def count_failures(prefix: str, samples: Sequence[Sample]) -> Metrics:
    """Count failed attempts by exception; no metrics if none failed."""
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


def count_groups(rewards: Sequence[Sequence[float]]) -> Metrics:
    """Count groups with zero reward spread, by their common reward."""
    counts = Counter(group[0] for group in rewards if len(group) > 1 and min(group) == max(group))
    return {f"rollout/zero_std/count_{value:g}": float(count) for value, count in sorted(counts.items())}


def _category(sample: Sample) -> str:
    return str(sample.metadata.get("error", "unknown")).partition(":")[0]
