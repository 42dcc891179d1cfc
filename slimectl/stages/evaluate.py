"""Held-out prompts in, graded samples and pass rates out."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from slimectl.algorithms.pass_rates import majority_at_n
from slimectl.algorithms.statistics import count_failures
from slimectl.errors import RecordError
from slimectl.hooks import hook
from slimectl.ports import Agent, Engine, Executor, RewardFn
from slimectl.settings import Settings
from slimectl.settings.evaluate import Dataset
from slimectl.settings.run import TrackSettings
from slimectl.stages.attempt import Attempts, single_turn
from slimectl.stages.own_rollout import FUNCTION, own_evaluation
from slimectl.stages.rollout import rollout, sampling_params
from slimectl.stages.round_metrics import asked_for, pass_rates
from slimectl.stages.sample_hooks import on_sample
from slimectl.stages.score import Grader, reward_number, score
from slimectl.streams import tee
from slimectl.types import Metrics, Prompt, Sample, Status, TableRow

OF_ROLLOUT = ("input_key", "label_key", "tool_key", "metadata_key", "stop", "stop_token_ids", "min_new_tokens",
              "custom_generate_function_path")  # fmt: skip
OF_EVAL = ("n_samples_per_prompt", "temperature", "top_p", "top_k", "max_response_len", "success_threshold")
"""Where the settings of a dataset of its own go: to the section that has the same key."""


def settings_for(settings: Settings, name: str) -> Settings:
    """The settings under which dataset `name` is sampled and graded: its own over [eval]'s over the others'.

    A name that [eval] has no dataset of gets [eval]'s.
    """
    given, own = settings.eval, settings.eval.datasets.get(name, Dataset(path="-"))

    def chosen(keys: Sequence[str], *sections: Any) -> dict[str, Any]:
        """For each key the first value that a section gives."""
        found = {key: [getattr(s, key, None) for s in sections if getattr(s, key, None) is not None] for key in keys}
        return {key: values[0] for key, values in found.items() if values}

    graded = chosen(("reward_key",), own, given)
    if own.custom_rm_path:
        graded |= {"custom_rm_path": own.custom_rm_path}
    elif rm_type := own.rm_type or given.rm_type:
        graded |= {"rm_type": rm_type, "custom_rm_path": None, "rm": []}
        if rm_type != settings.score.rm_type:
            graded["rm_options"] = {}  # those of another verifier
    return settings.model_copy(
        update={
            "rollout": settings.rollout.model_copy(update=chosen(OF_ROLLOUT, own, given)),
            "score": settings.score.model_copy(update=graded),
            "eval": given.model_copy(update=chosen(OF_EVAL, own)),
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
) -> Iterator[Sample]:
    """Sample and grade; what [eval] leaves open is as in [rollout]. `settings` are those of the dataset.

    `rollout_id` rounds have been trained on. A function of the user's for whole rounds (rollout.function_path) samples
    evaluations too. Prompts that leave no room for an answer are `left_out`.
    """
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
    seen = on_sample(settings)
    if function := hook(settings, FUNCTION):
        attempts = Attempts(engine, tokenizer, asked, agent or single_turn, params, True, on_sample=seen)
        samples = own_evaluation(function, prompts, attempts, settings, rollout_id, left_out)
    else:
        samples = rollout(
            prompts, engine, tokenizer, asked, agent=agent, params=params, evaluation=True, on_sample=seen,
            rollout_id=rollout_id, left_out=left_out,
        )  # fmt: skip
    return score(samples, reward, settings.score, executor=executor)


def summarized(
    name: str,
    samples: Iterable[Sample],
    metrics: Metrics,
    settings: Settings,
    *,
    answer: Callable[[Sample], str | None] | None = None,
    too_long: Sequence[Prompt] = (),
) -> Iterator[Sample]:
    """The graded samples of one dataset, as they come; when they have ended, `metrics` has their summary.

    `answer` says what a sample answered (see `answer_of`); `too_long` holds by then the prompts that were left out.
    """
    seen: list[Sample] = []
    for sample in tee(samples, seen.append):
        sample.metadata.setdefault("dataset", name)
        yield sample
    threshold, key = settings.eval.success_threshold, settings.score.reward_key
    metrics |= summarize(name, seen, success_threshold=threshold, reward_key=key, answer=answer, track=settings.track)
    if too_long:
        metrics[f"eval/{name}/prompts_too_long"] = float(len(too_long))


def answer_of(reward: RewardFn) -> Callable[[Sample], str | None]:
    """What of a sample is compared in a vote: what its verifier graded, or "pred" of a reward that is a dict."""

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
    """The metrics of one dataset: rewards, accuracy, unbiased pass@k, avg@n, maj@n, lengths, truncation.

    maj@n only where some sample has an `answer`; [track] may ask for more. Raises RecordError without samples.
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
    metrics |= count_failures(f"eval/{name}/", samples) | _of_groups(name, samples, right, answer)
    return metrics | asked_for(f"eval/{name}/", samples, rewards, right, track or TrackSettings())


def _of_groups(
    name: str, samples: Sequence[Sample], right: Sequence[bool], answer: Callable[[Sample], str | None] | None
) -> Metrics:
    """What several answers to a prompt say together; nothing where there is one each."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        groups[sample.group_index].append(i)
    n = min(map(len, groups.values()))
    if n == 1:
        return {}
    metrics = {f"eval/{name}-avg@{n}": statistics.fmean(statistics.fmean(right[i] for i in g) for g in groups.values())}
    metrics |= pass_rates(f"eval/{name}-", [sample.group_index for sample in samples], right)
    answers = [answer(sample) for sample in samples] if answer else []
    if any(found is not None for found in answers):
        votes = [majority_at_n([answers[i] for i in g], [right[i] for i in g]) for g in groups.values()]
        metrics[f"eval/{name}-maj@{n}"] = statistics.fmean(votes)
    return metrics


def table_of(samples: Iterable[Sample], rows: int, *, reward_key: str | None = None) -> list[TableRow]:
    """One answer to each of the first prompts, to be read; the same prompts at every evaluation."""
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
