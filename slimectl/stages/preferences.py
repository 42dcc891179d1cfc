"""Preference learning: records to samples, groups to pairs of rows, pairs to loss gradients.

P pairs. The rows of a pair are adjacent, the better one first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slimectl.algorithms.estimators import TrainingBatch
from slimectl.algorithms.normalization import RewardMoments
from slimectl.algorithms.preferences import dpo_rewards, preference_loss, preference_pairs
from slimectl.chats.model_tokens import unknown_token
from slimectl.data.images import images_of
from slimectl.data.preferences import Preference
from slimectl.data.prompts import BadRow, without_bad
from slimectl.errors import RecordError
from slimectl.settings.algorithm import Pairwise
from slimectl.settings.needs import AlgorithmSection, Need
from slimectl.settings.rollout import RolloutSettings
from slimectl.settings.score import ScoreSettings
from slimectl.stages.finite_check import Outputs
from slimectl.stages.long_prompts import demonstration_excess, drop_long
from slimectl.stages.rollout import demonstration
from slimectl.stages.score import reward_number
from slimectl.types import Metrics, Prompt, Sample, TrainingSample

PAIR_BITS = 32


def preferred(
    preferences: Iterable[Preference],
    tokenizer: Any,
    settings: RolloutSettings,
    *,
    context: int | None = None,
    on_skipped: Callable[[Prompt], Any] = lambda prompt: None,
    on_bad_row: BadRow | None = None,
) -> Iterator[Sample]:
    """Yield two samples per preference: the chosen response with reward 1, the rejected one with reward 0.

    The loss mask is 1 on the assistant's tokens after the common prefix. A preference with a side longer than
    `context`, or with a token for which the model has no embedding, is passed to `on_skipped`. Raises RecordError, with
    file and line, for a response that the tokenizer's chat template cannot render, and if all are skipped.
    """

    def answers(pair: Preference) -> tuple[Prompt, list[Sample]]:
        samples = []
        for place, answer in enumerate((pair.chosen, pair.rejected)):
            sample = demonstration(answer, tokenizer, settings, from_message=pair.shared)
            sample.index, sample.reward = 2 * answer.index + place, 1.0 - place
            samples.append(sample)
        return pair.chosen, samples

    def excess(item: tuple[Prompt, list[Sample]]) -> str:
        reasons = (
            unknown_token(sample.tokens, tokenizer) or demonstration_excess(sample, settings, context)
            for sample in item[1]
        )
        return next(filter(None, reasons), "")

    pairs = without_bad(map(answers, preferences), on_bad_row)
    for _, samples in drop_long(pairs, lambda item: item[0], excess, on_skipped):
        yield from samples


def build_preference_batch(
    samples: Sequence[Sample],
    algorithm: Pairwise,
    score: ScoreSettings,
    shaped: Sequence[float] | None = None,
    moments: RewardMoments | None = None,
) -> tuple[TrainingBatch, Metrics]:
    """Return both rows of every pair, with the pair's number as execution, and the number of groups without a pair.

    Raises RecordError if a sample lacks a reward, or the reference's log-probabilities if they are needed.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.reward is None:
            raise RecordError(f"sample {sample.index}: no reward. Run `slimectl score` on these samples first")
        if Need.REFERENCE in algorithm.needs and sample.ref_log_probs is None:
            raise RecordError(f"sample {sample.index}: no ref_log_probs. Add --reference DIR to `slimectl score`")
        groups.setdefault(sample.group_index, []).append(sample)
    batch = TrainingBatch([], [])
    metrics: Metrics = {}
    for group in groups.values():
        pairs = preference_pairs([reward_number(sample, score.reward_key) for sample in group], algorithm.pairs)
        if not pairs:
            name = "rollout/dynamic_filter/drop_no_preference"
            metrics[name] = metrics.get(name, 0.0) + 1.0
        for members in pairs:
            better, worse = (group[i] for i in members)
            # Sample numbers of a run fit into 32 bits. The number of a pair contains both.
            pair = better.trajectory_id << PAIR_BITS | worse.trajectory_id
            batch.rows += [_row(sample, algorithm) for sample in (better, worse)]
            batch.executions += [pair, pair]
    return batch, metrics


def sample_ids(executions: Sequence[int], algorithm: AlgorithmSection) -> list[int]:
    """Return the sample number of each row, which is its execution or its half of the pair's number."""
    if Need.PAIRS not in algorithm.needs:
        return list(executions)
    low = (1 << PAIR_BITS) - 1
    return [pair & low if i % 2 else pair >> PAIR_BITS for i, pair in enumerate(executions)]


def set_preference_gradients(rows: Sequence[TrainingSample], algorithm: Any, outputs: Outputs) -> Metrics:
    """Set `TrainingSample.advantages` to the negative gradient of each pair's loss with respect to the outputs.

    `outputs` are the policy's log-probabilities, or a reward model's values. Returns loss, pair_accuracy,
    reward_margin, chosen_reward and rejected_reward, as means over the pairs of the step.
    """
    reference = _masked_sums(rows, [row.ref_log_probs or [0.0] * row.response_length for row in rows])
    rewards = dpo_rewards(_masked_sums(rows, outputs(rows)), reference, beta=algorithm.beta)
    margins_P = rewards[::2] - rewards[1::2]
    losses_P, slopes_P = preference_loss(margins_P, label_smoothing=algorithm.label_smoothing)
    for i, row in enumerate(rows):
        slope = algorithm.beta * float(slopes_P[i // 2]) * (1 if i % 2 else -1)
        row.advantages = [slope] * row.response_length
    return {
        "train/loss": float(losses_P.mean()),
        "train/pair_accuracy": float((margins_P > 0).double().mean()),
        "train/reward_margin": float(margins_P.mean()),
        "train/chosen_reward": float(rewards[::2].mean()),
        "train/rejected_reward": float(rewards[1::2].mean()),
    }


def _masked_sums(rows: Sequence[TrainingSample], values: Sequence[Sequence[float]]) -> Tensor:
    """Return the sum of each row's values over its trained tokens."""
    return torch.tensor(
        [
            sum(value for value, weight in zip(row_values, row.loss_weights, strict=True) if weight)
            for row, row_values in zip(rows, values, strict=True)
        ],
        dtype=torch.float64,
    )


def _row(sample: Sample, algorithm: Pairwise) -> TrainingSample:
    """Return the row of a compared response. All tokens count, or for a reward model the value after the last one."""
    if algorithm.trained_output == "log_probs":
        weights = [float(bit) for bit in sample.mask()]
        return TrainingSample(
            sample.tokens,
            sample.response_length,
            weights,
            ref_log_probs=sample.ref_log_probs,
            group=sample.group_index,
            images=images_of(sample),
        )
    # A value belongs to the state before a token. An unused extra token gives the value after the last one.
    tokens = [*sample.tokens, sample.tokens[-1]]
    weights = [0.0] * sample.response_length + [1.0]
    return TrainingSample(
        tokens, sample.response_length + 1, weights, group=sample.group_index, images=images_of(sample)
    )
