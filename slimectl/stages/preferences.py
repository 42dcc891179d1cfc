"""Preferences: records to samples, groups of samples to pairs of rows, pairs to what a policy learns.

P pairs; their rows stand together, the better one first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slimectl.algorithms.preferences import dpo_rewards, preference_loss, preference_pairs
from slimectl.data.preferences import Preference
from slimectl.errors import RecordError
from slimectl.ports import Critic, Policy
from slimectl.settings.algorithm import Dpo, Pairwise, RewardModel
from slimectl.settings.rollout import RolloutSettings
from slimectl.stages.long_prompts import demonstration_excess, drop_long
from slimectl.stages.rollout import demonstration
from slimectl.stages.score import reward_number
from slimectl.types import Metrics, Prompt, Row, Sample

PAIR_BITS = 32


def preferred(
    preferences: Iterable[Preference],
    tokenizer: Any,
    settings: RolloutSettings,
    *,
    context: int | None = None,
    left_out: Callable[[Prompt], Any] = lambda prompt: None,
) -> Iterator[Sample]:
    """Two samples for every preference, the answer that was chosen with reward 1, the one that was rejected with 0.

    The loss mask counts what the assistant said after all that both share. A preference of which one side is longer
    than `context` is `left_out`. Raises RecordError, with file and line, for an answer that the tokenizer's chat
    template cannot show, and where all are too long.
    """

    def answers(number: int, pair: Preference) -> tuple[Prompt, list[Sample]]:
        samples = []
        for place, answer in enumerate((pair.chosen, pair.rejected)):
            sample = demonstration(answer, tokenizer, settings, from_message=pair.shared)
            sample.index, sample.reward = 2 * number + place, 1.0 - place
            samples.append(sample)
        return pair.chosen, samples

    def excess(item: tuple[Prompt, list[Sample]]) -> str:
        return next(filter(None, (demonstration_excess(sample, settings, context) for sample in item[1])), "")

    pairs = (answers(i, pair) for i, pair in enumerate(preferences))
    for _, samples in drop_long(pairs, lambda item: item[0], excess, left_out):
        yield from samples


def paired_rows(
    samples: Sequence[Sample], algorithm: Pairwise, *, reward_key: str | None, metrics: Metrics
) -> list[tuple[int, Row]]:
    """(pair, row) of every pair of every group; groups without one are counted in `metrics`.

    Raises RecordError if a sample lacks a reward, or the reference's log-probabilities where they are needed.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.reward is None:
            raise RecordError(f"sample {sample.index}: no reward; run `slimectl score` on these samples first")
        if isinstance(algorithm, Dpo) and sample.ref_log_probs is None:
            raise RecordError(f"sample {sample.index}: no ref_log_probs; add --reference DIR to `slimectl score`")
        groups.setdefault(sample.group_index, []).append(sample)
    made: list[tuple[int, Row]] = []
    for group in groups.values():
        pairs = preference_pairs([reward_number(sample, reward_key) for sample in group], algorithm.pairs)
        if not pairs:
            name = "rollout/dynamic_filter/drop_no_preference"
            metrics[name] = metrics.get(name, 0.0) + 1.0
        for members in pairs:
            better, worse = (group[i] for i in members)
            # Samples of a run are numbered within 32 bits, and a pair is known by both.
            pair = better.execution << PAIR_BITS | worse.execution
            made += [(pair, _row(sample, algorithm)) for sample in (better, worse)]
    return made


def sample_ids(executions: Sequence[int], algorithm: object) -> list[int]:
    """Return the samples' numbers of rows: their executions, or the halves of a pair's number."""
    if not isinstance(algorithm, Pairwise):
        return list(executions)
    low = (1 << PAIR_BITS) - 1
    return [pair & low if i % 2 else pair >> PAIR_BITS for i, pair in enumerate(executions)]


def set_slopes(rows: Sequence[Row], algorithm: Pairwise, policy: Policy, critic: Critic | None) -> Metrics:
    """Write `Row.advantages`: how the loss of each pair falls with each token's value; what a person wants to know.

    Metrics: loss, pair_accuracy, reward_margin, chosen_reward, rejected_reward, means over the pairs of the step.
    """
    if isinstance(algorithm, Dpo):
        rewards = _sums(rows, policy.log_probs(rows))
        reference = _sums(rows, [row.ref_log_probs or [] for row in rows])
        rewards, scale = dpo_rewards(rewards, reference, beta=algorithm.beta), algorithm.beta
        smoothing = algorithm.label_smoothing
    else:
        assert critic is not None
        rewards, scale, smoothing = _sums(rows, critic.values(rows)), 1.0, 0.0
    margins_P = rewards[::2] - rewards[1::2]
    losses_P, slopes_P = preference_loss(margins_P, label_smoothing=smoothing)
    for i, row in enumerate(rows):
        slope = scale * float(slopes_P[i // 2]) * (1 if i % 2 else -1)
        row.advantages = [slope] * row.response_length
    return {
        "train/loss": float(losses_P.mean()),
        "train/pair_accuracy": float((margins_P > 0).double().mean()),
        "train/reward_margin": float(margins_P.mean()),
        "train/chosen_reward": float(rewards[::2].mean()),
        "train/rejected_reward": float(rewards[1::2].mean()),
    }


def _sums(rows: Sequence[Row], values: Sequence[Sequence[float]]) -> Tensor:
    """The sum of each row's values where it is trained on."""
    return torch.tensor(
        [
            sum(value for value, weight in zip(each, row.weights, strict=True) if weight)
            for row, each in zip(rows, values, strict=True)
        ],
        dtype=torch.float64,
    )


def _row(sample: Sample, algorithm: Pairwise) -> Row:
    """An answer that is compared: by all of its tokens, or by one value after its last token (a reward model)."""
    if not isinstance(algorithm, RewardModel):
        weights = [float(bit) for bit in sample.mask()]
        return Row(
            sample.tokens, sample.response_length, weights, ref_log_probs=sample.ref_log_probs, group=sample.group_index
        )
    # A value is that of the state before a token: one more token, never looked at, lets the last one be seen.
    tokens = [*sample.tokens, sample.tokens[-1]]
    weights = [0.0] * sample.response_length + [1.0]
    return Row(tokens, sample.response_length + 1, weights, group=sample.group_index)
