"""The train stage: updates a policy on scored samples, round by round."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, cast

from slimectl.algorithms.normalization import RewardMoments
from slimectl.protocols import Critic, ResettableOptimizer
from slimectl.settings import Settings
from slimectl.stages.advantages import Models, attach_model_outputs, attach_scores, set_advantages
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.stages.metrics import batch_metrics, round_rewards
from slimectl.stages.mismatch import LogProbCheck
from slimectl.stages.optimizer_step import StepIndex, optimizer_step, rollouts_of
from slimectl.stages.recorded_rounds import sample_batches
from slimectl.stages.signal import NO_SIGNAL, SignalCount, missing_signal
from slimectl.stages.training_batch import build_training_batch
from slimectl.types import Metrics, RolloutBatch, Sample, StepReport, TrainingSample

Minibatch = list[tuple[int, TrainingSample]]
"""(execution, row) of the whole rollouts of an optimizer step."""


@dataclass
class TrainState:
    """Progress of training that a checkpoint stores in addition to weights and optimizer."""

    step: int = 0
    """Number of optimizer steps."""

    rollout_id: int = 0
    """Number of rounds started."""

    pending: Minibatch = field(default_factory=list)
    """(execution, row) of rollouts that did not fill a step of train.global_batch_size. The next step starts with them.
    """

    signal: SignalCount = field(default_factory=SignalCount)
    """Counts of rounds with and without signal."""

    moments: RewardMoments = field(default_factory=RewardMoments)
    """Moments of the rewards of all rounds, if the algorithm normalizes by them."""

    @property
    def place(self) -> tuple[int, int]:
        """Round and step of the policy."""
        return self.rollout_id, self.step

    def next_step(self, step_in_round: int = 0) -> StepIndex:
        """Count one more optimizer step, and return its position in the run."""
        self.step += 1
        return StepIndex(self.step, self.rollout_id, step_in_round)


def train(
    samples: Iterable[Sample],
    models: Models,
    settings: Settings,
    *,
    state: TrainState | None = None,
    hooks: Hooks = NO_HOOKS,
) -> Iterator[StepReport]:
    """Train on samples round by round, and yield one report per optimizer step.

    A round is `settings.rollouts_per_round` rollouts, because advantages need whole groups. Nothing beyond a round is
    read before its steps are done and reported, so a lazy source is sampled on-policy. (If a rollout consists of
    several samples, one sample past the last is read.) Remaining samples at the end make a last, smaller step. For
    pairwise algorithms a round is run.rollout_batch_size groups. ppo needs a critic. A reward model is critic and
    policy in one.

    Raises RecordError for samples that this algorithm cannot train on, and SlimectlError for samples of another model
    with run.on_logprob_mismatch = "stop".
    """
    rounds = sample_batches(samples, settings.algorithm, settings.rollouts_per_round)
    check = LogProbCheck(settings, recorded=True)
    for report in train_batches(map(RolloutBatch, rounds), models, settings, state=state, hooks=hooks):
        yield report
        check.check(report)


def train_batches(
    batches: Iterable[RolloutBatch],
    models: Models,
    settings: Settings,
    *,
    state: TrainState | None = None,
    hooks: Hooks = NO_HOOKS,
) -> Iterator[StepReport]:
    """Train on rounds of samples. Yield one report per optimizer step, with the metrics and samples of its batch.

    Rows that do not fill a step of train.global_batch_size wait for the next round. Rows that remain at the end make a
    last, smaller step. A round that does not fill a step is reported without one, so that its rewards are still
    measured. The last report of a round has the times and memory of the round.
    """
    state = state or TrainState()
    options = settings.algorithm.critic_options
    if options is not None and options.shared:
        models = replace(models, critic=cast(Critic, models.policy))
    sampling = None
    for batch in batches:
        state.rollout_id += 1
        sampling = batch.state
        yield from _train_batch(batch, models, settings, state, hooks)
    if state.pending:
        minibatch, state.pending = state.pending, []
        for i, (epoch, step) in enumerate(_epochs([minibatch], settings, state)):
            report = _step_report(step, models, settings, hooks, state, place=(i, epoch))
            report.sampling = sampling
            report.metrics.pop("rollout/entropy", None)  # the policy has changed since the round was sampled
            report.last_step_of_round = epoch == settings.epochs_per_round
            if report.last_step_of_round:
                report.timings |= _round_timings(models, state.rollout_id)
            yield report


def _train_batch(
    batch: RolloutBatch, models: Models, settings: Settings, state: TrainState, hooks: Hooks
) -> Iterator[StepReport]:
    """Train on one round in five passes: rows, outputs of the models, advantages, metrics, and the optimizer steps."""
    timer = models.timer
    attach_scores(batch.samples, models, settings)
    with timer.time("perf/data_preprocess_time"):
        version = int(models.policy.weight_version)
        data, metrics = build_training_batch(batch.samples, settings, hooks, version=version, moments=state.moments)
        has_older_rows = bool(state.pending)
        state.pending += zip(data.executions, data.rows, strict=True)
        waiting = [row for _, row in state.pending]
        minibatches = list(_take_minibatches(state, settings))
        # With several steps the policy changes before the last row is used.
        several_steps = len(minibatches) * settings.epochs_per_round > 1 or has_older_rows or bool(state.pending)
        attach_model_outputs(waiting, models, settings.algorithm, hooks, several_steps=several_steps)
        with timer.time("perf/advantages_time"):
            metrics |= set_advantages(data, settings, hooks, state.rollout_id)
        reason = missing_signal(data, settings, hooks)
        state.signal.add(reason)
        metrics |= ({NO_SIGNAL: 1.0} if reason else {}) | batch_metrics(batch.samples, data, settings)
    if settings.train.reset_optimizer_states and minibatches:
        for model in filter(None, dict.fromkeys((models.policy, models.critic))):
            cast(ResettableOptimizer, model).reset_optimizer()
    steps = list(_epochs(minibatches, settings, state)) or [(1, Minibatch())]
    for i, (epoch, minibatch) in enumerate(steps):
        report = _step_report(minibatch, models, settings, hooks, state, place=(i, epoch))
        if i == 0:
            report.metrics = metrics | report.metrics | {"rollout/step": float(state.rollout_id)} | batch.metrics
            report.samples, report.rewards = batch.samples, round_rewards(batch.samples, data, settings.score)
            report.timings |= batch.timings
        report.sampling = batch.state
        report.last_step_of_round = i == len(steps) - 1
        if report.last_step_of_round:
            report.timings |= _round_timings(models, state.rollout_id)
        yield report


def _round_timings(models: Models, rollout_id: int) -> Metrics:
    """Return the timer's metrics of a round, with the memory of the training processes."""
    models.timer.note_peaks(models.policy)
    return models.timer.take(rollout_id)


def _epochs(minibatches: Sequence[Minibatch], settings: Settings, state: TrainState) -> Iterator[tuple[int, Minibatch]]:
    """Yield (epoch, minibatch) for every step of a round. Later epochs deal its shuffled rollouts into the same sizes.

    The order depends on run.seed, the round and the epoch, so a resumed run has the same steps.
    """
    yield from ((1, minibatch) for minibatch in minibatches)
    if settings.epochs_per_round == 1:
        return
    rollouts: dict[tuple[int, int], Minibatch] = {}
    rows = [row for minibatch in minibatches for row in minibatch]
    for row, rollout in zip(rows, rollouts_of(rows), strict=True):
        rollouts.setdefault(rollout, []).append(row)
    sizes = [len(set(rollouts_of(minibatch))) for minibatch in minibatches]
    for epoch in range(2, settings.epochs_per_round + 1):
        order = list(rollouts.values())
        random.Random(f"{settings.run.seed}:{state.rollout_id}:{epoch}").shuffle(order)
        remaining = iter(order)
        for size in sizes:
            yield epoch, [row for rollout in islice(remaining, size) for row in rollout]


def _take_minibatches(state: TrainState, settings: Settings) -> Iterator[Minibatch]:
    """Take full minibatches of whole rollouts from the pending rows. Without a batch size, take the whole round."""
    while state.pending:
        rollouts = list(dict.fromkeys(rollouts_of(state.pending)))
        if settings.one_step_per_round:
            step_rollouts = set(rollouts)
        elif len(rollouts) >= settings.rollouts_per_step:
            step_rollouts = set(rollouts[: settings.rollouts_per_step])
        else:
            return
        belongs = [rollout in step_rollouts for rollout in rollouts_of(state.pending)]
        step = [item for item, taken in zip(state.pending, belongs, strict=True) if taken]
        state.pending = [item for item, taken in zip(state.pending, belongs, strict=True) if not taken]
        yield step


def _step_report(
    minibatch: Minibatch,
    models: Models,
    settings: Settings,
    hooks: Hooks,
    state: TrainState,
    *,
    place: tuple[int, int],
) -> StepReport:
    """Make one optimizer step and return its report. Without rows, return the report of a round without a step.

    `place` is the number of the step in its round, from 0, and the epoch, from 1.
    """
    step_in_round, epoch = place
    clock = models.timer.clock
    started, train_data = clock(), list[dict[str, Any]]()
    metrics: Metrics = {}
    timings: Metrics = {}
    if minibatch:
        keep = train_data.append if settings.run.keep_samples == "train" else None
        metrics = optimizer_step(minibatch, models, settings.algorithm, hooks, state.next_step(step_in_round), keep)
        metrics["train/step"] = float(state.step)
        if settings.epochs_per_round > 1:
            metrics["train/ppo_epoch"] = float(epoch)
        seconds, tokens = clock() - started, sum(len(row.tokens) for _, row in minibatch)
        timings = {"perf/train_time": seconds, "perf/actor_train_tok_per_s": tokens / seconds if seconds else 0.0}
    if state.pending:
        metrics["train/rollouts_left_over"] = float(len(set(rollouts_of(state.pending))))
    return StepReport(
        state.step,
        state.rollout_id,
        models.policy.weight_version,
        metrics,
        timings=timings,
        is_step=bool(minibatch),
        train_data=train_data,
    )
