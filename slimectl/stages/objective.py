"""What an algorithm makes of a round: which samples it keeps, their rows, its loss and its reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from slimectl.algorithms.advantages import group_advantages
from slimectl.algorithms.divergences import kl_estimate
from slimectl.algorithms.filters import has_signal
from slimectl.algorithms.losses import PolicyLoss, SftLoss
from slimectl.algorithms.reductions import Reduction, token_weights
from slimectl.algorithms.returns import reinforce_returns, whitened
from slimectl.algorithms.statistics import count_groups
from slimectl.errors import RecordError
from slimectl.ports import Loss
from slimectl.settings.algorithm import (
    GroupNormalized,
    PolicyGradient,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Sft,
)
from slimectl.stages.score import reward_number
from slimectl.types import Metrics, Row, Sample

LOSS_SETTINGS = {field.name for field in fields(PolicyLoss)}
"""The arguments of the loss; those that an algorithm has as settings are under the same names."""


def loss_of(algorithm: PolicyGradient | Sft) -> Loss:
    """The token loss that the settings ask for."""
    if isinstance(algorithm, Sft):
        return SftLoss()
    return PolicyLoss(surrogate=algorithm.surrogate, **algorithm.model_dump(include=LOSS_SETTINGS))


def weigh(rows: Sequence[Row], executions: Sequence[int], algorithm: PolicyGradient | Sft) -> None:
    """Turn the masks in `Row.weights` into the weights of one whole step: its reduction, denominators included."""
    masks = [[int(weight != 0) for weight in row.weights] for row in rows]
    fixed = algorithm.fixed_length if isinstance(algorithm, PolicyGradient) else None
    if algorithm.calculate_per_token_loss:
        weights = token_weights(masks, executions, kind="per_token")
    else:
        kind: Reduction = "fixed_length" if fixed else "rollout_mean"
        weights = token_weights(masks, executions, kind=kind, fixed_length=fixed)
    for row, weighed in zip(rows, weights, strict=True):
        row.weights = weighed


def require_groups(samples: Sequence[Sample], algorithm: PolicyGradient) -> None:
    """Raises RecordError if every prompt was answered once only: nothing could ever be learnt from comparing."""
    executions: dict[int, set[int]] = {}
    for sample in samples:
        executions.setdefault(sample.group_index, set()).add(sample.execution)
    if algorithm.baseline != "none" and all(len(members) == 1 for members in executions.values()):
        raise RecordError(
            f"group {next(iter(executions))}: one answer only; {algorithm.name} compares the answers to a prompt with "
            f"one another: sample several (rollout.n_samples_per_prompt)"
        )


def sft_rows(samples: Sequence[Sample]) -> list[Row]:
    return [_row(sample) for sample in samples]


def policy_rows(
    samples: Sequence[Sample],
    algorithm: PolicyGradient,
    *,
    reward_key: str | None,
    metrics: Metrics,
    log_probs: Callable[[Sequence[Row]], list[list[float]]],
) -> tuple[list[Sample], list[Row]]:
    """The samples that carry signal, as rows with their advantages; what was dropped and why goes to `metrics`.

    `log_probs` is the policy's pass over rows, asked for only where the reward is charged for divergence. Raises
    RecordError if a sample lacks a reward, or log-probabilities that a setting needs.
    """
    for sample in samples:
        if sample.reward is None:
            raise RecordError(f"sample {sample.index}: no reward; run `slimectl score` on these samples first")
    rewards = {id(sample): reward_number(sample, reward_key) for sample in samples}
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    metrics |= count_groups([[rewards[id(s)] for s in group] for group in groups.values()])
    if algorithm.drop_zero_std_groups:
        _drop_without_signal(groups, rewards, metrics)
    kept = [sample for sample in samples if sample.group_index in groups]
    rows = [_row(sample) for sample in kept]
    _require_log_probs(kept, algorithm)
    if algorithm.use_rollout_logprobs:
        for row in rows:
            row.old_log_probs = row.rollout_log_probs
    elif algorithm.kl_coef and rows:
        for row, old in zip(rows, log_probs(rows), strict=True):
            row.old_log_probs = old
    _set_advantages(rows, kept, [rewards[id(sample)] for sample in kept], algorithm)
    return kept, rows


def _set_advantages(rows: list[Row], samples: list[Sample], rewards: list[float], algorithm: PolicyGradient) -> None:
    """Write `Row.advantages`: rewards less divergence, compared within groups and spread over tokens."""
    masks = [_tensor(row.weights) for row in rows]
    penalties = [_divergence(row, algorithm) for row in rows]
    if isinstance(algorithm, ReinforcePlusPlus):
        by_token = [
            reinforce_returns(reward, kl_T, mask_T, kl_coef=algorithm.kl_coef, gamma=algorithm.gamma)
            for reward, kl_T, mask_T in zip(rewards, penalties, masks, strict=True)
        ]
    elif isinstance(algorithm, ReinforcePlusPlusBaseline):
        centred = _compared(samples, rewards, algorithm)
        by_token = [
            advantage - algorithm.kl_coef * (torch.zeros_like(mask_T) if kl_T is None else kl_T)
            for advantage, kl_T, mask_T in zip(centred, penalties, masks, strict=True)
        ]
    else:
        charged = [
            reward if kl_T is None else reward - algorithm.kl_coef * float((kl_T * mask_T).sum())
            for reward, kl_T, mask_T in zip(rewards, penalties, masks, strict=True)
        ]
        compared = _compared(samples, charged, algorithm)
        by_token = [advantage * torch.ones_like(mask_T) for advantage, mask_T in zip(compared, masks, strict=True)]
    if algorithm.normalize_advantages and by_token:
        by_token = whitened(by_token, masks)
    for row, advantages_T in zip(rows, by_token, strict=True):
        row.advantages = advantages_T.tolist()


def _compared(samples: list[Sample], rewards: list[float], algorithm: PolicyGradient) -> list[float]:
    """The advantage of each sample among its siblings."""
    assert algorithm.baseline != "none"
    return group_advantages(
        rewards,
        [sample.group_index for sample in samples],
        [sample.execution for sample in samples],
        baseline=algorithm.baseline,
        std_normalization=isinstance(algorithm, GroupNormalized) and algorithm.grpo_std_normalization,
        # What the policy wrote, also where it is not trained on: a removed sample still counts in the statistics.
        lengths=[sum(sample.loss_mask or [1] * sample.response_length) for sample in samples],
    )


def _divergence(row: Row, algorithm: PolicyGradient) -> Tensor | None:
    """The k1 estimate at every token where the reward is charged for it, else None."""
    if not algorithm.kl_coef:
        return None
    assert row.old_log_probs is not None
    assert row.ref_log_probs is not None
    return kl_estimate(_tensor(row.old_log_probs), _tensor(row.ref_log_probs), "k1")


def _tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _require_log_probs(samples: Sequence[Sample], algorithm: PolicyGradient) -> None:
    """Raises RecordError if a sample lacks log-probabilities that a setting makes use of."""
    sampled = "sample with `slimectl rollout`, which records them"
    reference = "add --reference DIR to `slimectl score`"
    wanted = {
        "algorithm.kl_coef": (algorithm.kl_coef > 0, "ref_log_probs", reference),
        "algorithm.kl_loss_coef": (algorithm.kl_loss_coef > 0, "ref_log_probs", reference),
        "algorithm.use_tis": (algorithm.use_tis, "rollout_log_probs", sampled),
        "algorithm.use_rollout_logprobs": (algorithm.use_rollout_logprobs, "rollout_log_probs", sampled),
    }
    for setting, (needed, name, way_out) in wanted.items():
        lacking = [sample for sample in samples if needed and getattr(sample, name) is None]
        if lacking:
            raise RecordError(f"sample {lacking[0].index}: no {name}, which {setting} needs; {way_out}")


def _drop_without_signal(groups: dict[int, list[Sample]], rewards: dict[int, float], metrics: Metrics) -> None:
    for key, group in list(groups.items()):
        keep, reason = has_signal([rewards[id(sample)] for sample in group])
        if not keep:
            name = f"rollout/dynamic_filter/drop_{reason}"
            metrics[name] = metrics.get(name, 0.0) + 1.0
            del groups[key]


def _row(sample: Sample) -> Row:
    """A sample as a row; its weights are the mask until the step's reduction is known."""
    return Row(
        tokens=sample.tokens,
        response_length=sample.response_length,
        weights=[float(bit) for bit in sample.mask()],
        ref_log_probs=sample.ref_log_probs,
        rollout_log_probs=sample.rollout_log_probs,
        group=sample.group_index,
    )
