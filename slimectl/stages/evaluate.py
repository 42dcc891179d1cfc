"""Held-out prompts in, graded samples and pass rates out."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from slimectl.algorithms.pass_rates import pass_at_k, powers_of_two
from slimectl.ports import Agent, Engine, Executor, RewardFn
from slimectl.settings import Settings
from slimectl.stages.rollout import rollout, sampling_params
from slimectl.stages.score import reward_number, score
from slimectl.streams import tee
from slimectl.types import Metrics, Prompt, Sample, Status


def evaluate(
    prompts: Iterable[Prompt],
    engine: Engine,
    tokenizer: Any,
    reward: RewardFn,
    settings: Settings,
    *,
    executor: Executor,
    agent: Agent | None = None,
) -> Iterator[Sample]:
    """Sample and grade; what [eval] leaves open is as in [rollout]."""
    given = settings.eval
    chosen: dict[str, Any] = {
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k,
        "max_tokens": given.max_response_len,
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    params = dataclasses.replace(sampling_params(settings.rollout), **chosen)
    asked = settings.rollout.model_copy(update={"n_samples_per_prompt": given.n_samples_per_prompt})
    samples = rollout(prompts, engine, tokenizer, asked, agent=agent, params=params, evaluation=True)
    return score(samples, reward, settings.score, executor=executor)


def summarized(name: str, samples: Iterable[Sample], metrics: Metrics, settings: Settings) -> Iterator[Sample]:
    """The graded samples of one dataset, as they come; when they have ended, `metrics` has their summary."""
    seen: list[Sample] = []
    for sample in tee(samples, seen.append):
        sample.metadata.setdefault("dataset", name)
        yield sample
    threshold, key = settings.eval.success_threshold, settings.score.reward_key
    metrics |= summarize(name, seen, success_threshold=threshold, reward_key=key)


def summarize(
    name: str, samples: Sequence[Sample], *, success_threshold: float = 1.0, reward_key: str | None = None
) -> Metrics:
    """The metrics of one dataset: mean reward, accuracy, unbiased pass@k and avg@n, lengths, truncation."""
    rewards = [reward_number(sample, reward_key) for sample in samples]
    lengths = [sample.response_length for sample in samples]
    groups: dict[int, list[bool]] = defaultdict(list)
    for sample, value in zip(samples, rewards, strict=True):
        groups[sample.group_index].append(value >= success_threshold)
    metrics = {
        f"eval/{name}": statistics.fmean(rewards),
        f"eval/{name}_accuracy": statistics.fmean(value >= success_threshold for value in rewards),
        f"eval/{name}-truncated_ratio": statistics.fmean(sample.status is Status.TRUNCATED for sample in samples),
        f"eval/{name}/response_len/mean": statistics.fmean(lengths),
        f"eval/{name}/response_len/median": float(statistics.median(lengths)),
        f"eval/{name}/response_len/max": float(max(lengths)),
        f"eval/{name}/response_len/min": float(min(lengths)),
    }
    n = min(map(len, groups.values()))
    if n > 1:
        metrics[f"eval/{name}-avg@{n}"] = statistics.fmean(statistics.fmean(right) for right in groups.values())
        for k in powers_of_two(n):
            rates = [pass_at_k(len(right), sum(right), k) for right in groups.values()]
            metrics[f"eval/{name}-pass@{k}"] = statistics.fmean(rates)
    return metrics
