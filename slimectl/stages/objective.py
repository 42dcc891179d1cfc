"""What an algorithm makes of a round: which samples it keeps, their rows, its loss and its reduction."""

from __future__ import annotations

from collections.abc import Sequence

from slimectl.algorithms.advantages import group_advantages
from slimectl.algorithms.filters import has_signal
from slimectl.algorithms.losses import PolicyLoss, SftLoss
from slimectl.algorithms.reductions import Reduction, token_weights
from slimectl.algorithms.statistics import count_groups
from slimectl.errors import RecordError
from slimectl.ports import Loss
from slimectl.settings.algorithm import Grpo, Sft
from slimectl.stages.score import reward_number
from slimectl.types import Metrics, Row, Sample

LOSS_SETTINGS = {
    "eps_clip", "eps_clip_high", "eps_clip_c", "kl_loss_coef", "kl_loss_type", "use_unbiased_kl", "entropy_coef",
    "use_tis", "tis_clip", "tis_clip_low",
}  # fmt: skip
"""The settings of GRPO that are arguments of its loss, under the same names."""


def loss_of(algorithm: Grpo | Sft) -> Loss:
    """The token loss that the settings ask for."""
    if isinstance(algorithm, Sft):
        return SftLoss()
    return PolicyLoss(**algorithm.model_dump(include=LOSS_SETTINGS))


def weigh(rows: Sequence[Row], executions: Sequence[int], algorithm: Grpo | Sft) -> None:
    """Turn the masks in `Row.weights` into the weights of one whole step: its reduction, denominators included."""
    masks = [[int(weight != 0) for weight in row.weights] for row in rows]
    fixed = algorithm.fixed_length if isinstance(algorithm, Grpo) else None
    if algorithm.calculate_per_token_loss:
        weights = token_weights(masks, executions, kind="per_token")
    else:
        kind: Reduction = "fixed_length" if fixed else "rollout_mean"
        weights = token_weights(masks, executions, kind=kind, fixed_length=fixed)
    for row, weighed in zip(rows, weights, strict=True):
        row.weights = weighed


def require_groups(samples: Sequence[Sample]) -> None:
    """Raises RecordError if every prompt was answered once only: nothing could ever be learnt from comparing."""
    executions: dict[int, set[int]] = {}
    for sample in samples:
        executions.setdefault(sample.group_index, set()).add(sample.execution)
    if all(len(members) == 1 for members in executions.values()):
        raise RecordError(
            f"group {next(iter(executions))}: one answer only; GRPO compares the answers to a prompt with one another: "
            f"sample several (rollout.n_samples_per_prompt)"
        )


def sft_rows(samples: Sequence[Sample]) -> list[Row]:
    return [_row(sample) for sample in samples]


def grpo_rows(
    samples: Sequence[Sample], algorithm: Grpo, *, reward_key: str | None, metrics: Metrics
) -> tuple[list[Sample], list[Row]]:
    """The samples that carry signal, as rows with their advantages; what was dropped and why goes to `metrics`."""
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
    advantages = group_advantages(
        [rewards[id(sample)] for sample in kept],
        [sample.group_index for sample in kept],
        [sample.execution for sample in kept],
        std_normalization=algorithm.grpo_std_normalization,
    )
    rows = [_row(sample) for sample in kept]
    for row, advantage in zip(rows, advantages, strict=True):
        row.advantages = [advantage] * row.response_length
    return kept, rows


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
