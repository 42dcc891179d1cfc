"""Evaluates a policy: held-out prompts in, graded samples and pass rates out."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from slimectl.algorithms.metrics import count_failures, majority_at_n
from slimectl.data.streams import tee
from slimectl.errors import RecordError
from slimectl.protocols import Agent, Engine, Executor, RewardFn
from slimectl.settings import Settings
from slimectl.settings.evaluate import Dataset
from slimectl.settings.run import TrackSettings
from slimectl.stages.generation import GroupGenerator, single_turn
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.stages.metrics import optional_metrics, pass_rates
from slimectl.stages.rollout import rollout, sampling_params
from slimectl.stages.score import Grader, reward_number, score
from slimectl.stages.whole_rounds import whole_round_evaluation
from slimectl.types import Metrics, Prompt, Sample, Status, TableRow

OF_ROLLOUT = ("input_key", "label_key", "tool_key", "metadata_key", "stop", "stop_token_ids", "min_new_tokens",
              "custom_generate_function_path")  # fmt: skip
OF_EVAL = ("n_samples_per_prompt", "temperature", "top_p", "top_k", "max_response_len", "success_threshold")
"""Settings of a dataset, by the section whose key they override."""


def resolve_dataset_settings(settings: Settings, name: str) -> Settings:
    """Return the settings of dataset `name`: its own override [eval]'s, which override those of other sections.

    A name without a dataset in [eval] gets the settings of [eval].
    """
    eval_settings, dataset = settings.eval, settings.eval.datasets.get(name, Dataset(path="-"))

    def first_set(keys: Sequence[str], *sections: Any) -> dict[str, Any]:
        """Return the first value of each key that one of the sections sets."""
        candidates = {
            key: [getattr(s, key, None) for s in sections if getattr(s, key, None) is not None] for key in keys
        }
        return {key: values[0] for key, values in candidates.items() if values}

    score_update = first_set(("reward_key",), dataset, eval_settings)
    if dataset.custom_rm_path:
        score_update |= {"custom_rm_path": dataset.custom_rm_path}
    elif rm_type := dataset.rm_type or eval_settings.rm_type:
        score_update |= {"rm_type": rm_type, "custom_rm_path": None, "rm": []}
        if rm_type != settings.score.rm_type:
            score_update["rm_options"] = {}  # they belong to another verifier
    return settings.model_copy(
        update={
            "rollout": settings.rollout.model_copy(update=first_set(OF_ROLLOUT, dataset, eval_settings)),
            "score": settings.score.model_copy(update=score_update),
            "eval": eval_settings.model_copy(update=first_set(OF_EVAL, dataset)),
        }
    )


def evaluate(
    prompts: Iterable[Prompt],
    engine: Engine,
    tokenizer: Any,
    reward: RewardFn,
    settings: Settings,
    *,
    executor: Executor,
    agent: Agent | None = None,
    rollout_id: int = 0,
    left_out: Callable[[Prompt], Any] = lambda prompt: None,
    hooks: Hooks = NO_HOOKS,
) -> Iterator[Sample]:
    """Sample and grade held-out prompts; [eval] overrides [rollout]. `settings` are those of the dataset.

    `rollout_id` is the number of rounds trained on. `hooks.sample_rounds` also samples
    evaluations. Prompts that leave no room for an answer are passed to `left_out`.
    """
    eval_settings = settings.eval
    overrides: dict[str, Any] = {
        "temperature": eval_settings.temperature,
        "top_p": eval_settings.top_p,
        "top_k": eval_settings.top_k,
        "max_tokens": eval_settings.max_response_len,
    }
    overrides = {name: value for name, value in overrides.items() if value is not None}
    params = dataclasses.replace(sampling_params(settings.rollout), **overrides)
    rollout_settings = settings.rollout.model_copy(update={"n_samples_per_prompt": eval_settings.n_samples_per_prompt})
    if hooks.sample_rounds is not None:
        attempts = GroupGenerator(
            engine, tokenizer, rollout_settings, agent or single_turn, params, True, on_sample=hooks.on_sample
        )
        samples = whole_round_evaluation(prompts, attempts, hooks.sample_rounds, rollout_id, left_out)
    else:
        samples = rollout(
            prompts, engine, tokenizer, rollout_settings, agent=agent, params=params, evaluation=True,
            hooks=hooks, rollout_id=rollout_id, left_out=left_out,
        )  # fmt: skip
    return score(samples, reward, settings.score, executor=executor)


def with_summary(
    name: str,
    samples: Iterable[Sample],
    metrics: Metrics,
    settings: Settings,
    *,
    answer: Callable[[Sample], str | None] | None = None,
    too_long: Sequence[Prompt] = (),
) -> Iterator[Sample]:
    """Yield the graded samples of one dataset, then write their summary into `metrics`.

    `answer` extracts the answer of a sample (see `answer_extractor`); `too_long` has the dropped prompts by then.
    """
    collected: list[Sample] = []
    for sample in tee(samples, collected.append):
        sample.metadata.setdefault("dataset", name)
        yield sample
    threshold, key = settings.eval.success_threshold, settings.score.reward_key
    metrics |= summarize(
        name, collected, success_threshold=threshold, reward_key=key, answer=answer, track=settings.track
    )
    if too_long:
        metrics[f"eval/{name}/prompts_too_long"] = float(len(too_long))


def answer_extractor(reward: RewardFn) -> Callable[[Sample], str | None]:
    """Return a function that extracts the answer compared in a majority vote.

    The answer is the text that the verifier graded, or "pred" of a reward that is a dict.
    """

    def answer(sample: Sample) -> str | None:
        if isinstance(sample.reward, dict) and "pred" in sample.reward:
            return str(sample.reward["pred"])
        if not isinstance(reward, Grader) or sample.custom_rm_path or reward.settings.score.custom_rm_path:
            return None
        return reward.verifier_of(sample).extract(sample)

    return answer


def summarize(
    name: str,
    samples: Sequence[Sample],
    *,
    success_threshold: float = 1.0,
    reward_key: str | None = None,
    answer: Callable[[Sample], str | None] | None = None,
    track: TrackSettings | None = None,
) -> Metrics:
    """Return the metrics of one dataset: rewards, accuracy, unbiased pass@k, avg@n, maj@n, lengths, truncation.

    maj@n needs a sample with an `answer`; [track] may enable more. Raises RecordError without samples.
    """
    if not samples:
        raise RecordError(f"eval.data.{name}: no prompts; give a source that has some")
    rewards = [reward_number(sample, reward_key) for sample in samples]
    right = [value >= success_threshold for value in rewards]
    lengths = [sample.response_length for sample in samples]
    metrics = {
        f"eval/{name}": statistics.fmean(rewards),
        f"eval/{name}_avg_reward": statistics.fmean(rewards),
        f"eval/{name}_max_reward": max(rewards),
        f"eval/{name}_min_reward": min(rewards),
        f"eval/{name}_samples": float(len(samples)),
        f"eval/{name}_accuracy": statistics.fmean(right),
        f"eval/{name}-truncated_ratio": statistics.fmean(sample.status is Status.TRUNCATED for sample in samples),
        f"eval/{name}/response_len/mean": statistics.fmean(lengths),
        f"eval/{name}/response_len/median": float(statistics.median(lengths)),
        f"eval/{name}/response_len/max": float(max(lengths)),
        f"eval/{name}/response_len/min": float(min(lengths)),
    }
    metrics |= count_failures(f"eval/{name}/", samples) | _group_metrics(name, samples, right, answer)
    return metrics | optional_metrics(f"eval/{name}/", samples, rewards, right, track or TrackSettings())


def _group_metrics(
    name: str, samples: Sequence[Sample], right: Sequence[bool], answer: Callable[[Sample], str | None] | None
) -> Metrics:
    """Return avg@n, pass@k and maj@n of the groups; nothing if prompts have one answer each."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        groups[sample.group_index].append(i)
    n = min(map(len, groups.values()))
    if n == 1:
        return {}
    metrics = {f"eval/{name}-avg@{n}": statistics.fmean(statistics.fmean(right[i] for i in g) for g in groups.values())}
    metrics |= pass_rates(f"eval/{name}-", [sample.group_index for sample in samples], right)
    answers = [answer(sample) for sample in samples] if answer else []
    if any(text is not None for text in answers):
        votes = [majority_at_n([answers[i] for i in g], [right[i] for i in g]) for g in groups.values()]
        metrics[f"eval/{name}-maj@{n}"] = statistics.fmean(votes)
    return metrics


def table_of(samples: Iterable[Sample], rows: int, *, reward_key: str | None = None) -> list[TableRow]:
    """Return one answer to each of the first `rows` prompts as a table; the same prompts at every evaluation."""
    first = {sample.group_index: sample for sample in reversed(list(samples))}
    return [
        {
            "prompt": text if isinstance(text := sample.prompt, str) else json.dumps(text, ensure_ascii=False),
            "answer": sample.response,
            "label": "" if sample.label is None else str(sample.label),
            "reward": reward_number(sample, reward_key),
        }
        for _, sample in sorted(first.items())[:rows]
    ]
