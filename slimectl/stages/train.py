"""Scored samples in, new weights out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from slimectl.algorithms.advantages import group_advantages
from slimectl.algorithms.filters import has_signal
from slimectl.algorithms.losses import PolicyLoss, SftLoss
from slimectl.algorithms.reductions import Reduction, token_weights
from slimectl.algorithms.statistics import count_groups, rollout_metrics
from slimectl.errors import RecordError
from slimectl.ports import Loss, Policy
from slimectl.settings import Settings
from slimectl.settings.algorithm import Grpo, Sft
from slimectl.stages.score import reward_number
from slimectl.streams import batched
from slimectl.types import Metrics, Row, Sample, Status, StepReport


@dataclass
class TrainState:
    """Where training stands: what a checkpoint keeps besides weights and optimizer."""

    step: int = 0
    """Optimizer steps taken, or tried: a round without any signal counts as one."""

    rollout_id: int = 0
    """Rounds begun."""

    pending: list[tuple[int, Row]] = field(default_factory=list)
    """Rollouts (by execution) that did not fill a step of train.global_batch_size; the next step begins with them."""


def train(
    samples: Iterable[Sample], policy: Policy, settings: Settings, *, state: TrainState | None = None
) -> Iterator[StepReport]:
    """Learn from samples, round by round; one report per optimizer step.

    A round is `settings.rollouts_per_round` samples: advantages need whole groups. Nothing beyond a round is pulled
    before its steps are done and reported, so a lazy source is sampled on-policy. Samples left over at the end make a
    last, smaller step. Raises RecordError for samples that this algorithm cannot learn from.
    """
    state = state or TrainState()
    for batch in batched(samples, settings.rollouts_per_round):
        state.rollout_id += 1
        yield from _round(batch, policy, settings, state)
    if state.pending:
        rows, state.pending = state.pending, []
        state.step += 1
        yield _step(rows, policy, settings, state, {}, [])


def _round(samples: list[Sample], policy: Policy, settings: Settings, state: TrainState) -> Iterator[StepReport]:
    started = time.perf_counter()
    metrics: Metrics = {}
    kept = _fresh(samples, policy, settings, metrics)
    kept, rows = _sft_rows(kept) if isinstance(settings.algorithm, Sft) else _grpo_rows(kept, settings, metrics)
    rewarded = [sample for sample in samples if sample.reward is not None]
    metrics |= rollout_metrics(samples, [reward_number(s, settings.score.reward_key) for s in rewarded])
    executions = [sample.execution for sample in kept]
    _add_old_log_probs(rows, kept, policy, settings)
    state.pending += zip(executions, rows, strict=True)
    perf = {"perf/data_preprocess_time": time.perf_counter() - started}
    steps = list(_steps(state, settings))
    for i, chosen in enumerate(steps or [[]]):
        state.step += 1
        report = _step(chosen, policy, settings, state, metrics if i == 0 else {}, samples if i == 0 else [])
        report.perf |= perf if i == 0 else {}
        report.ends_round = i == max(0, len(steps) - 1)
        yield report


def _fresh(samples: list[Sample], policy: Policy, settings: Settings, metrics: Metrics) -> list[Sample]:
    """The samples that are not failed and not staler than allowed; how stale they are goes to the metrics."""
    now = int(policy.weight_version)
    ages = [now - min(map(int, sample.weight_versions)) for sample in samples if _numbered(sample)]
    if ages:
        metrics["rollout/staleness/mean"] = sum(ages) / len(ages)
        metrics["rollout/staleness/max"] = float(max(ages))
    kept = [sample for sample in samples if sample.status is not Status.FAILED]
    limit = settings.run.max_staleness
    if limit is not None:
        young = [s for s in kept if not _numbered(s) or now - min(map(int, s.weight_versions)) <= limit]
        if len(young) < len(kept):
            metrics["rollout/dynamic_filter/drop_stale"] = float(len(kept) - len(young))
        kept = young
    return kept


def _numbered(sample: Sample) -> bool:
    return bool(sample.weight_versions) and all(version.isdecimal() for version in sample.weight_versions)


def _grpo_rows(samples: list[Sample], settings: Settings, metrics: Metrics) -> tuple[list[Sample], list[Row]]:
    """The samples that carry signal, as rows with their advantages."""
    algorithm = settings.algorithm
    assert isinstance(algorithm, Grpo)
    for sample in samples:
        if sample.reward is None:
            raise RecordError(f"sample {sample.index}: no reward; run `slimectl score` on these samples first")
    rewards = {id(sample): reward_number(sample, settings.score.reward_key) for sample in samples}
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    if groups and all(len({s.execution for s in group}) == 1 for group in groups.values()):
        raise RecordError(
            f"group {next(iter(groups))}: one answer only; GRPO compares the answers to a prompt with one another: "
            f"sample several (rollout.n_samples_per_prompt)"
        )
    metrics |= count_groups([[rewards[id(s)] for s in group] for group in groups.values()])
    if algorithm.drop_zero_std_groups:
        for key, group in list(groups.items()):
            keep, reason = has_signal([rewards[id(sample)] for sample in group])
            if not keep:
                name = f"rollout/dynamic_filter/drop_{reason}"
                metrics[name] = metrics.get(name, 0.0) + 1.0
                del groups[key]
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


def _sft_rows(samples: list[Sample]) -> tuple[list[Sample], list[Row]]:
    return samples, [_row(sample) for sample in samples]


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


def _add_old_log_probs(rows: list[Row], samples: list[Sample], policy: Policy, settings: Settings) -> None:
    """Whose probabilities the ratio is taken against.

    With one step per round the policy is still the one of the old pass, and the loss takes its own values without
    gradient: the same numbers for one forward pass less.
    """
    algorithm = settings.algorithm
    if not isinstance(algorithm, Grpo) or not rows:
        return
    if algorithm.kl_loss_coef > 0:
        _require(
            samples,
            "ref_log_probs",
            "algorithm.kl_loss_coef",
            "score with a reference (`slimectl score --reference DIR`)",
        )
    if algorithm.use_rollout_logprobs or algorithm.use_tis:
        key = "algorithm.use_tis" if algorithm.use_tis else "algorithm.use_rollout_logprobs"
        _require(samples, "rollout_log_probs", key, "sample with `slimectl rollout`, which records them")
    if algorithm.use_rollout_logprobs:
        for row in rows:
            row.old_log_probs = row.rollout_log_probs
    elif settings.steps_per_round > 1:
        for row, log_probs in zip(rows, policy.log_probs(rows), strict=True):
            row.old_log_probs = log_probs


def _require(samples: Sequence[Sample], field: str, setting: str, way_out: str) -> None:
    for sample in samples:
        if getattr(sample, field) is None:
            raise RecordError(f"sample {sample.index}: no {field}, which {setting} needs; {way_out}")


def _steps(state: TrainState, settings: Settings) -> Iterator[list[tuple[int, Row]]]:
    """Full steps of whole rollouts off the pending rows; without a batch size the whole round is one step."""
    whole_round = settings.train.global_batch_size is None and settings.train.num_steps_per_rollout is None
    while state.pending:
        executions = list(dict.fromkeys(execution for execution, _ in state.pending))
        if whole_round:
            chosen = set(executions)
        elif len(executions) >= settings.rollouts_per_step:
            chosen = set(executions[: settings.rollouts_per_step])
        else:
            return
        step = [item for item in state.pending if item[0] in chosen]
        state.pending = [item for item in state.pending if item[0] not in chosen]
        yield step


def _step(
    chosen: list[tuple[int, Row]],
    policy: Policy,
    settings: Settings,
    state: TrainState,
    metrics: Metrics,
    samples: list[Sample],
) -> StepReport:
    """One optimizer step over rows; none is taken where nothing carries signal."""
    started = time.perf_counter()
    metrics = dict(metrics)
    rows = [row for _, row in chosen]
    if rows:
        kind, loss = reduction_and_loss(settings)
        fixed = getattr(settings.algorithm, "fixed_length", None)
        masks = [[int(weight != 0) for weight in row.weights] for row in rows]
        executions = [execution for execution, _ in chosen]
        for row, weights in zip(rows, token_weights(masks, executions, kind=kind, fixed_length=fixed), strict=True):
            row.weights = weights
        summed = policy.forward_backward(rows, loss) | policy.optim_step()
        metrics |= {f"train/{name}": value for name, value in summed.items()}
        metrics["train/global_batch_size"] = float(len(set(executions)))
    if state.pending:
        metrics["train/rollouts_left_over"] = float(len({execution for execution, _ in state.pending}))
    metrics["train/step"] = float(state.step)
    if samples:
        metrics["rollout/step"] = float(state.rollout_id)
    seconds = time.perf_counter() - started
    tokens = sum(len(row.tokens) for row in rows)
    perf = {"perf/train_time": seconds, "perf/actor_train_tok_per_s": tokens / seconds}
    return StepReport(state.step, state.rollout_id, policy.weight_version, metrics, samples, perf)


def reduction_and_loss(settings: Settings) -> tuple[Reduction, Loss]:
    """How token losses become one number, and the loss itself."""
    algorithm = settings.algorithm
    if isinstance(algorithm, Sft):
        return ("per_token" if algorithm.calculate_per_token_loss else "rollout_mean"), SftLoss()
    kind: Reduction = "fixed_length" if algorithm.fixed_length else "rollout_mean"
    if algorithm.calculate_per_token_loss:
        kind = "per_token"
    return kind, PolicyLoss(
        eps_clip=algorithm.eps_clip,
        eps_clip_high=algorithm.eps_clip_high,
        eps_clip_c=algorithm.eps_clip_c,
        kl_loss_coef=algorithm.kl_loss_coef,
        kl_loss_type=algorithm.kl_loss_type,
        use_unbiased_kl=algorithm.use_unbiased_kl,
        entropy_coef=algorithm.entropy_coef,
        use_tis=algorithm.use_tis,
        tis_clip=algorithm.tis_clip,
        tis_clip_low=algorithm.tis_clip_low,
    )
