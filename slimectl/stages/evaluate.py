"""Evaluates a policy on held-out prompts: graded samples, accuracy and pass rates."""

from __future__ import annotations

import dataclasses
import json
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from slimectl.algorithms.metrics import count_failures, majority_at_n
from slimectl.data.streams import tee
from slimectl.errors import RecordError
from slimectl.protocols import Agent, Executor, RewardFn
from slimectl.rewards import Verifier
from slimectl.settings import Settings
from slimectl.settings.evaluate import Dataset
from slimectl.settings.run import TrackSettings
from slimectl.stages.generation import GroupGenerator, sampling_params, single_turn
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.stages.metrics import component_metrics, optional_metrics, pass_rates
from slimectl.stages.prompt_groups import PromptSource
from slimectl.stages.request_times import take_requests
from slimectl.stages.rollout import rollout
from slimectl.stages.score import Grader, report_grading, reward_number, score
from slimectl.stages.whole_rounds import whole_round_samples
from slimectl.types import Metrics, Prompt, Sample, Status, TableRow, text_of_label

OF_ROLLOUT = ("input_key", "label_key", "tool_key", "metadata_key", "stop", "stop_token_ids", "min_new_tokens",
              "custom_generate_function_path", "repetition_penalty", "presence_penalty",
              "frequency_penalty")  # fmt: skip
OF_EVAL = ("n_samples_per_prompt", "temperature", "top_p", "top_k", "max_response_len", "success_threshold")
"""Settings of a dataset, by the section whose keys they override."""


def resolve_dataset_settings(settings: Settings, name: str) -> Settings:
    """Return the settings of dataset `name`: its own settings override [eval], which overrides other sections.

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


@dataclasses.dataclass(frozen=True)
class HeldOutDataset:
    """A dataset of an evaluation, with what samples and grades it.

    `settings` come from `resolve_dataset_settings`. `hooks.sample_rounds` also samples evaluations.
    """

    name: str
    settings: Settings
    reward: RewardFn
    agent: Agent = single_turn
    hooks: Hooks = NO_HOOKS

    def evaluate(
        self,
        prompts: Iterable[Prompt],
        generator: GroupGenerator,
        metrics: Metrics,
        *,
        executor: Executor,
        rollout_id: int = 0,
    ) -> Iterator[Sample]:
        """Sample and grade prompts with the engine of a generator. After the last sample, add to `metrics`.

        [eval] overrides [rollout]. `rollout_id` is the number of rounds trained on. Prompts that leave no room for a
        response are only counted.
        """
        too_long: list[Prompt] = []
        generator = self._generator(generator, too_long)
        source, sample_rounds = PromptSource(prompts, generator), self.hooks.sample_rounds
        if sample_rounds is None:
            generator.rollout_id = rollout_id
            samples = rollout(source)
        else:
            source.read_all()
            samples = whole_round_samples(source, sample_rounds(generator), max_rounds=1, first=rollout_id)
        graded = score(samples, self.reward, self.settings.score, executor=executor)
        yield from self.summarized(graded, metrics, too_long)
        take_requests(generator.requests, self.settings.track.timeline_requests, dataset=self.name, round=rollout_id)

    def _generator(self, generator: GroupGenerator, too_long: list[Prompt]) -> GroupGenerator:
        rollout_settings, settings = self.settings.rollout, self.settings.eval
        overrides: dict[str, Any] = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "max_tokens": settings.max_response_len,
        }
        overrides = {name: value for name, value in overrides.items() if value is not None}
        return dataclasses.replace(
            generator,
            settings=rollout_settings.model_copy(update={"n_samples_per_prompt": settings.n_samples_per_prompt}),
            params=dataclasses.replace(sampling_params(rollout_settings), top_log_probs=0, **overrides),
            agent=self.agent,
            hooks=self.hooks,
            evaluation=True,
            on_skipped=too_long.append,
        )

    def summarized(
        self, samples: Iterable[Sample], metrics: Metrics, too_long: Sequence[Prompt] = ()
    ) -> Iterator[Sample]:
        """Yield graded samples, then write their summary into `metrics`.

        `too_long` has the skipped prompts when all samples have been read.
        """
        name, settings, collected = self.name, self.settings, list[Sample]()
        for sample in tee(samples, collected.append):
            sample.metadata.setdefault("dataset", name)
            yield sample
        report_grading(collected, settings.score, f"eval.data.{name}")
        metrics |= summarize(
            name, collected, success_threshold=settings.eval.success_threshold,
            reward_key=settings.score.reward_key, answer=AnswerExtractor(self.reward), track=settings.track,
        )  # fmt: skip
        if too_long:
            metrics[f"eval/{name}/prompts_too_long"] = float(len(too_long))


@dataclasses.dataclass(frozen=True)
class AnswerExtractor:
    """Extracts and compares the answers of a majority vote: the text that the verifier graded, or a reward's "pred"."""

    reward: RewardFn

    def __call__(self, sample: Sample) -> str | None:
        if isinstance(sample.reward, dict) and "pred" in sample.reward:
            pred = sample.reward["pred"]
            return None if pred is None else str(pred) or None
        verifier = self._verifier(sample)
        return verifier.extract(sample) if verifier else None

    def same(self, sample: Sample, first: str, second: str) -> bool:
        """Return whether two answers are equal according to the sample's verifier, or as strings without one."""
        verifier = self._verifier(sample)
        return verifier.same_answer(sample, first, second) if verifier else first == second

    def _verifier(self, sample: Sample) -> Verifier | None:
        if not isinstance(self.reward, Grader) or self.reward.has_agent_rewards([sample]):
            return None
        return self.reward.verifier_of(sample)


def summarize(
    name: str,
    samples: Sequence[Sample],
    *,
    success_threshold: float = 1.0,
    reward_key: str | None = None,
    answer: AnswerExtractor | None = None,
    track: TrackSettings | None = None,
) -> Metrics:
    """Return the metrics of one dataset: rewards, accuracy, unbiased pass@k, avg@n, maj@n, lengths, truncation.

    An attempt that an agent split into several samples counts once, as in training. It has the mean of their rewards,
    the sum of their lengths, and the answer of the last one. maj@n needs a sample with an `answer`. [track] may enable
    more metrics. Samples without a reward (score.none_reward) are counted, but excluded from all other metrics. Raises
    RecordError for an empty dataset.
    """
    if not samples:
        raise RecordError(f"eval.data.{name}: no prompts. Give a source that has some")
    unrewarded = sum(sample.has_no_reward for sample in samples)
    samples = [sample for sample in samples if not sample.has_no_reward]
    if not samples:
        raise RecordError(
            f"eval.data.{name}: no sample has a reward, because every reward function returned None. Return a number."
        )
    attempts = _attempts(samples)
    rewards = [statistics.fmean(reward_number(part, reward_key) for part in parts) for parts in attempts]
    right = [value >= success_threshold for value in rewards]
    lengths = [sum(part.response_length for part in parts) for parts in attempts]
    cut = [any(part.status is Status.TRUNCATED for part in parts) for parts in attempts]
    samples = [parts[-1] for parts in attempts]
    metrics = {
        f"eval/{name}": statistics.fmean(rewards),
        f"eval/{name}_avg_reward": statistics.fmean(rewards),
        f"eval/{name}_max_reward": max(rewards),
        f"eval/{name}_min_reward": min(rewards),
        f"eval/{name}_samples": float(len(samples)),
        f"eval/{name}_accuracy": statistics.fmean(right),
        f"eval/{name}-truncated_ratio": statistics.fmean(cut),
        f"eval/{name}/response_len/mean": statistics.fmean(lengths),
        f"eval/{name}/response_len/median": float(statistics.median(lengths)),
        f"eval/{name}/response_len/max": float(max(lengths)),
        f"eval/{name}/response_len/min": float(min(lengths)),
    }
    if unrewarded:
        metrics[f"eval/{name}/no_reward"] = float(unrewarded)
    for kind, values in (("accuracy", right), ("avg_reward", rewards)):
        if (error := _standard_error(samples, values)) is not None:
            metrics[f"eval/{name}_{kind}_stderr"] = error
    metrics |= component_metrics(f"eval/{name}/", samples, reward_key)
    metrics |= count_failures(f"eval/{name}/", samples) | _group_metrics(name, samples, right, answer)
    return metrics | optional_metrics(f"eval/{name}/", samples, rewards, right, track or TrackSettings())


def _attempts(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each attempt. An agent may split an attempt into several."""
    attempts: dict[tuple[int, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        attempts[sample.group_index, sample.trajectory_id].append(sample)
    return list(attempts.values())


def _standard_error(samples: Sequence[Sample], values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of `values` over prompts, or None for a single prompt.

    Responses to one prompt depend on each other, so the mean of each prompt is one observation (Miller 2024,
    arXiv:2411.00640, on clustered questions).
    """
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for sample, value in zip(samples, values, strict=True):
        by_prompt[sample.group_index].append(value)
    means = [statistics.fmean(answers) for answers in by_prompt.values()]
    return statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else None


def _group_metrics(
    name: str, samples: Sequence[Sample], right: Sequence[bool], answer: AnswerExtractor | None
) -> Metrics:
    """Return avg@n, pass@k and maj@n of the groups, or nothing if prompts have one response each."""
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
        votes = [
            majority_at_n(
                [answers[i] for i in g],
                [right[i] for i in g],
                partial(answer.same, samples[g[0]]) if answer else operator.eq,
            )
            for g in groups.values()
        ]
        metrics[f"eval/{name}-maj@{n}"] = statistics.fmean(votes)
    return metrics


def table_of(samples: Iterable[Sample], rows: int, *, reward_key: str | None = None) -> list[TableRow]:
    """Return a table of `rows` samples, the same ones at every evaluation: one of each prompt before a second one."""
    attempts: Counter[int] = Counter()
    samples = [sample for sample in samples if not sample.has_no_reward]
    ranked: list[tuple[int, int, Sample]] = []
    for sample in sorted(samples, key=lambda sample: (sample.group_index, sample.index)):
        ranked.append((attempts[sample.group_index], sample.group_index, sample))
        attempts[sample.group_index] += 1
    return [
        {
            "prompt": text if isinstance(text := sample.prompt, str) else json.dumps(text, ensure_ascii=False),
            "response": sample.response,
            "label": text_of_label(sample.label),
            "reward": reward_number(sample, reward_key),
        }
        for _, _, sample in sorted(ranked, key=lambda entry: entry[:2])[:rows]
    ]
