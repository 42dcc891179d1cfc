"""Trains a policy: scored samples in, updated weights out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import cast

from slimectl.algorithms.losses import PolicyLoss
from slimectl.algorithms.metrics import rollout_metrics
from slimectl.algorithms.value_loss import PolicyAndValueLoss, ValueLoss
from slimectl.protocols import Critic, Policy
from slimectl.settings import Settings
from slimectl.settings.algorithm import Pairwise, PolicyGradient, Ppo, RewardModel, critic_is_shared
from slimectl.stages.advantages import critic_step, explained
from slimectl.stages.finite_check import FiniteCheck
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.stages.metrics import reward_metrics, round_metrics, row_metrics, sample_counts
from slimectl.stages.preferences import build_preference_batch, sample_ids, set_preference_gradients
from slimectl.stages.score import reward_number
from slimectl.stages.training_batch import (
    build_policy_batch,
    build_sft_batch,
    loss_of,
    require_groups,
    set_loss_weights,
)
from slimectl.types import Metrics, RolloutBatch, Sample, Status, StepReport, TrainingSample

METRIC_ALIASES = {"pg_clipfrac": "clipfrac", "kl_loss": "kl"}
"""Metrics that are reported under a second name."""


@dataclass
class TrainState:
    """Progress of training that a checkpoint stores besides weights and optimizer."""

    step: int = 0
    """Optimizer steps, including those of rounds without any signal, which make no update."""

    rollout_id: int = 0
    """Rounds started."""

    pending: list[tuple[int, TrainingSample]] = field(default_factory=list)
    """(execution, row) of rollouts that did not fill a step of train.global_batch_size; the next step starts with them.
    """


@dataclass(frozen=True)
class Models:
    """The models that a step updates: the policy, and the critic if there is one."""

    policy: Policy
    critic: Critic | None = None


def train(
    samples: Iterable[Sample],
    policy: Policy,
    settings: Settings,
    *,
    critic: Critic | None = None,
    state: TrainState | None = None,
    hooks: Hooks = NO_HOOKS,
) -> Iterator[StepReport]:
    """Train on samples, round by round; yield one report per optimizer step.

    A round is `settings.rollouts_per_round` rollouts: advantages need whole groups. Nothing beyond a round is read
    before its steps are done and reported, so a lazy source is sampled on-policy (only if a rollout consists of
    several samples, one sample past the last is read). Remaining samples at the end make a last, smaller step. Raises
    RecordError for samples that this algorithm cannot train on. ppo needs a `critic`; a reward model is a critic that
    is also passed as the policy. For pairwise algorithms a round is run.rollout_batch_size groups.
    """
    if isinstance(settings.algorithm, Pairwise):
        rounds = _batch_groups(samples, settings.train.global_batch_size or settings.run.rollout_batch_size)
    else:
        rounds = _batch_rollouts(samples, settings.rollouts_per_round)
    yield from train_batches(map(RolloutBatch, rounds), policy, settings, critic=critic, state=state, hooks=hooks)


def train_batches(
    batches: Iterable[RolloutBatch],
    policy: Policy,
    settings: Settings,
    *,
    critic: Critic | None = None,
    state: TrainState | None = None,
    hooks: Hooks = NO_HOOKS,
) -> Iterator[StepReport]:
    """Train on rounds of samples; yield one report per optimizer step, with what its batch brought along.

    Rows that do not fill a step of train.global_batch_size wait for the next round; those that remain at the end make
    a last, smaller step.
    """
    state = state or TrainState()
    models = Models(policy, cast(Critic, policy) if critic_is_shared(settings.algorithm) else critic)
    sampling = None
    for batch in batches:
        state.rollout_id += 1
        sampling = batch.state
        yield from _train_batch(batch, models, settings, state, hooks)
    if state.pending:
        rows, state.pending = state.pending, []
        state.step += 1
        report = _train_step(rows, models, settings, state, hooks)
        report.sampling = sampling
        yield report


def _batch_rollouts(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Yield lists of `size` whole rollouts; the samples of a fan-out are adjacent and share their rollout_id."""
    batch: list[Sample] = []
    count = 0
    for sample in samples:
        continues = bool(batch) and sample.rollout_id is not None and sample.rollout_id == batch[-1].rollout_id
        if count == size and not continues:
            yield batch
            batch, count = [], 0
        batch.append(sample)
        count += not continues
        if count == size and sample.rollout_id is None:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


def _batch_groups(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Yield lists of `size` whole groups, whose samples are adjacent."""
    batch: list[list[Sample]] = []
    for _, group in groupby(samples, key=lambda sample: sample.group_index):
        batch.append(list(group))
        if len(batch) == size:
            yield [sample for members in batch for sample in members]
            batch = []
    if batch:
        yield [sample for members in batch for sample in members]


def _train_batch(
    batch: RolloutBatch, models: Models, settings: Settings, state: TrainState, hooks: Hooks
) -> Iterator[StepReport]:
    """Train on one round: build its rows, then make one optimizer step per minibatch."""
    started = time.perf_counter()
    algorithm, rewards_key = settings.algorithm, settings.score.reward_key
    samples, shaped = _apply_hooks(batch.samples, algorithm, hooks)
    rows, metrics = _build_rows(samples, models, settings, state.rollout_id, hooks, rewards=shaped and shaped[1])
    rewards = [reward_number(s, rewards_key) for s in batch.samples if s.reward is not None]
    if shaped and len(samples) == len(batch.samples):
        rewards = shaped[0]
    metrics |= rollout_metrics(batch.samples, rewards) | round_metrics(batch.samples, rewards, settings)
    metrics |= reward_metrics(shaped[1]) if shaped else {}
    state.pending += rows
    waiting = [row for _, row in state.pending]
    minibatches = list(_take_minibatches(state, settings))
    if isinstance(algorithm, PolicyGradient):
        will_update = len(minibatches) > 1 or bool(state.pending) or algorithm.tis_batch_normalize
        _compute_old_log_probs(waiting, models.policy, will_update=will_update)
    metrics |= row_metrics([row for _, row in rows])
    timings = {"perf/data_preprocess_time": time.perf_counter() - started, **batch.timings}
    for i, minibatch in enumerate(minibatches or [[]]):
        state.step += 1
        report = _train_step(minibatch, models, settings, state, hooks, step_id=i, batch_metrics=None if i else metrics)
        if i == 0:
            report.samples = batch.samples
            report.metrics |= batch.metrics
            report.timings |= timings
        report.sampling = batch.state
        report.last_step_of_round = i == max(0, len(minibatches) - 1)
        yield report


def _apply_hooks(
    samples: list[Sample], algorithm: object, hooks: Hooks
) -> tuple[list[Sample], tuple[list[float], list[float]] | None]:
    """Return the samples to train on and the user's rewards for them, None for unchanged rewards.

    Losses that are not policy gradients (also those of a warm-up) use the samples unchanged.
    """
    if not isinstance(algorithm, PolicyGradient):
        return samples, None
    hooks.filter_samples(samples)
    training_samples = hooks.convert(samples)
    return training_samples, hooks.post_process_rewards(training_samples)


def _build_rows(
    samples: list[Sample],
    models: Models,
    settings: Settings,
    rollout_id: int,
    hooks: Hooks,
    *,
    rewards: Sequence[float] | None,
) -> tuple[list[tuple[int, TrainingSample]], Metrics]:
    """Return (execution, row) for the samples that are trained on, and metrics of those that are not.

    Only the loss weights of the step are missing in the rows. `rewards` become advantages without further
    normalization.
    """
    policy, algorithm, key = models.policy, settings.algorithm, settings.score.reward_key
    fresh, metrics = _select_fresh(samples, int(policy.weight_version), settings.run.max_staleness)
    retained = [samples[i] for i in fresh]
    if isinstance(algorithm, Pairwise):
        pairs, pair_metrics = build_preference_batch(retained, algorithm, reward_key=key)
        return pairs, metrics | pair_metrics
    if not isinstance(algorithm, PolicyGradient):
        rows = build_sft_batch(retained)
        return list(zip((sample.execution for sample in retained), rows, strict=True)), metrics
    require_groups(samples, algorithm)
    batch = build_policy_batch(
        retained,
        algorithm,
        reward_key=key,
        log_probs=policy.log_probs,
        critic=models.critic,
        custom=hooks.advantages,
        shaped=None if rewards is None else [rewards[i] for i in fresh],
    )
    if hooks.post_process_rows is not None:
        _compute_old_log_probs(batch.rows, policy, will_update=True)
        numbers = [reward_number(sample, key) for sample in batch.samples]
        hooks.post_process_rows(batch.rows, batch.samples, numbers, rollout_id)
    executions = (sample.execution for sample in batch.samples)
    return list(zip(executions, batch.rows, strict=True)), metrics | batch.metrics


def _compute_old_log_probs(rows: list[TrainingSample], policy: Policy, *, will_update: bool) -> None:
    """Write `TrainingSample.old_log_probs`, the ratio's denominator, if the policy `will_update` before the last row.

    If all rows are new and make one step, the policy has not changed since, and the loss uses its own detached values:
    the same numbers with one forward pass less.
    """
    lacking = [row for row in rows if row.old_log_probs is None]
    if lacking and (will_update or len(lacking) < len(rows)):
        for row, log_probs in zip(lacking, policy.log_probs(lacking), strict=True):
            row.old_log_probs = log_probs


def _select_fresh(samples: list[Sample], version: int, max_staleness: int | None) -> tuple[list[int], Metrics]:
    """Return the positions of samples that are not failed and not staler than allowed, and metrics of staleness."""
    ages = [_age(sample, version) for sample in samples]
    metrics: Metrics = {}
    if known_ages := [age for age in ages if age is not None]:
        metrics["rollout/staleness/mean"] = sum(known_ages) / len(known_ages)
        metrics["rollout/staleness/max"] = float(max(known_ages))
    answered = [i for i, sample in enumerate(samples) if sample.status is not Status.FAILED]
    if max_staleness is None:
        return answered, metrics
    fresh = [i for i in answered if (ages[i] or 0) <= max_staleness]
    if len(fresh) < len(answered):
        metrics["rollout/dynamic_filter/drop_stale"] = float(len(answered) - len(fresh))
    return fresh, metrics


def _age(sample: Sample, version: int) -> int | None:
    """Return the weight versions between the oldest token of a sample and now; None for samples of other origin."""
    versions = sample.weight_versions
    if not versions or not all(text.isdecimal() for text in versions):
        return None
    # A policy that starts anew from a trained checkpoint counts from 0 again: the age of its samples is not negative.
    return max(0, version - min(map(int, versions)))


def _take_minibatches(state: TrainState, settings: Settings) -> Iterator[list[tuple[int, TrainingSample]]]:
    """Take full minibatches of whole rollouts from the pending rows; without a batch size, one for the whole round."""
    whole_round = settings.train.global_batch_size is None and settings.train.num_steps_per_rollout is None
    while state.pending:
        executions = list(dict.fromkeys(execution for execution, _ in state.pending))
        if whole_round:
            step_executions = set(executions)
        elif len(executions) >= settings.rollouts_per_step:
            step_executions = set(executions[: settings.rollouts_per_step])
        else:
            return
        step = [item for item in state.pending if item[0] in step_executions]
        state.pending = [item for item in state.pending if item[0] not in step_executions]
        yield step


def _train_step(
    minibatch: list[tuple[int, TrainingSample]],
    models: Models,
    settings: Settings,
    state: TrainState,
    hooks: Hooks,
    *,
    step_id: int = 0,
    batch_metrics: Metrics | None = None,
) -> StepReport:
    """Make one optimizer step and return its report; without rows no update is made.

    `batch_metrics` are those of a round, which its first step reports.
    """
    started = time.perf_counter()
    metrics = dict(batch_metrics or {})
    rows = [row for _, row in minibatch]
    if rows:
        executions = [execution for execution, _ in minibatch]
        set_loss_weights(rows, executions, settings.algorithm)
        hooks.before_step(models.policy, state.rollout_id, step_id)
        metrics |= sample_counts(rows) | _optimizer_step(rows, executions, models, settings, state, hooks)
        metrics["train/global_batch_size"] = float(len(set(executions)))
    if state.pending:
        metrics["train/rollouts_left_over"] = float(len({execution for execution, _ in state.pending}))
    metrics["train/step"] = float(state.step)
    if batch_metrics is not None:
        metrics["rollout/step"] = float(state.rollout_id)
    seconds = time.perf_counter() - started
    tokens = sum(len(row.tokens) for row in rows)
    timings = {"perf/train_time": seconds, "perf/actor_train_tok_per_s": tokens / seconds}
    return StepReport(state.step, state.rollout_id, models.policy.weight_version, metrics, timings=timings)


def _optimizer_step(
    rows: list[TrainingSample],
    executions: list[int],
    models: Models,
    settings: Settings,
    state: TrainState,
    hooks: Hooks,
) -> Metrics:
    """Update policy and critic on rows with loss weights and return the metrics. Raises DivergedError."""
    policy, critic, algorithm = models.policy, models.critic, settings.algorithm
    finite = FiniteCheck(rows, sample_ids(executions, algorithm), state.rollout_id, state.step)
    outputs = critic.values if isinstance(algorithm, RewardModel) and critic is not None else policy.log_probs
    pair_metrics: Metrics = {}
    if isinstance(algorithm, Pairwise):
        pair_metrics = set_preference_gradients(rows, algorithm, policy, critic)
        finite.check(pair_metrics, "train/loss", of="the pairs'", outputs=outputs)
    finite.check_rows()
    metrics: Metrics = {}
    if isinstance(algorithm, Ppo):
        assert critic is not None
        metrics = explained(rows) if critic_is_shared(algorithm) else critic_step(rows, critic, algorithm, finite)
        if state.step <= algorithm.num_critic_only_steps:
            return metrics
    custom_loss = hooks.loss if isinstance(algorithm, PolicyGradient) else None
    loss = custom_loss or loss_of(algorithm, rows)
    if isinstance(loss, PolicyLoss):
        loss = hooks.policy_loss(loss, rows, executions)
    if isinstance(algorithm, Ppo) and critic_is_shared(algorithm):
        loss = PolicyAndValueLoss(loss, ValueLoss(algorithm.value_clip), algorithm.value_coef)
    summed = finite.update(policy, loss, of="the", outputs=outputs)
    summed |= {alias: summed[name] for name, alias in METRIC_ALIASES.items() if name in summed}
    return metrics | {f"train/{name}": value for name, value in summed.items()} | pair_metrics
