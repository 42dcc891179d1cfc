"""Trains a policy: scored samples in, updated weights out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import cast

from slimectl.algorithms.metrics import rollout_metrics
from slimectl.protocols import Critic, Policy
from slimectl.settings import Settings
from slimectl.settings.needs import Need
from slimectl.stages.advantages import Models, attach_model_outputs, set_advantages
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.stages.metrics import round_metrics, row_metrics
from slimectl.stages.optimizer_step import StepIndex, optimizer_step
from slimectl.stages.score import reward_number
from slimectl.stages.training_batch import build_training_batch
from slimectl.types import Metrics, RolloutBatch, Sample, StepReport, TrainingSample


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

    def next_step(self, step_in_round: int = 0) -> StepIndex:
        """Count one more optimizer step, and return its place in the run."""
        self.step += 1
        return StepIndex(self.step, self.rollout_id, step_in_round)


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
    if Need.PAIRS in settings.algorithm.needs:
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
    options = settings.algorithm.critic_options
    models = Models(policy, cast(Critic, policy) if options is not None and options.shared else critic)
    sampling = None
    for batch in batches:
        state.rollout_id += 1
        sampling = batch.state
        yield from _train_batch(batch, models, settings, state, hooks)
    if state.pending:
        minibatch, state.pending = state.pending, []
        started, tokens = time.perf_counter(), sum(len(row.tokens) for _, row in minibatch)
        metrics = optimizer_step(minibatch, models, settings, hooks, state.next_step())
        report = _report(metrics, state, models.policy.weight_version, started=started, tokens=tokens)
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
    """Train on one round in five passes: rows, outputs of the models, advantages, metrics, and the optimizer steps."""
    started = time.perf_counter()
    data, metrics = build_training_batch(batch.samples, settings, hooks, version=int(models.policy.weight_version))
    has_older_rows = bool(state.pending)
    state.pending += zip(data.executions, data.rows, strict=True)
    waiting = [row for _, row in state.pending]
    minibatches = list(_take_minibatches(state, settings))
    # With several steps the policy changes before the last row is used.
    several_steps = len(minibatches) > 1 or has_older_rows or bool(state.pending)
    attach_model_outputs(waiting, models, settings.algorithm, hooks, several_steps=several_steps)
    metrics |= set_advantages(data, settings, hooks, state.rollout_id)
    rewards = data.reported_rewards
    if rewards is None:
        rewards = [reward_number(s, settings.score.reward_key) for s in batch.samples if s.reward is not None]
    metrics |= rollout_metrics(batch.samples, rewards)
    metrics |= round_metrics(batch.samples, rewards, data.normalized_rewards, settings)
    metrics |= row_metrics(data.rows)
    timings = {"perf/data_preprocess_time": time.perf_counter() - started, **batch.timings}
    for i, minibatch in enumerate(minibatches or [[]]):
        started, tokens = time.perf_counter(), sum(len(row.tokens) for _, row in minibatch)
        index = state.next_step(i)
        step = optimizer_step(minibatch, models, settings, hooks, index) if minibatch else {}
        report = _report(step, state, models.policy.weight_version, started=started, tokens=tokens)
        if i == 0:
            report.metrics = metrics | report.metrics | {"rollout/step": float(state.rollout_id)} | batch.metrics
            report.samples = batch.samples
            report.timings |= timings
        report.sampling = batch.state
        report.last_step_of_round = i == max(0, len(minibatches) - 1)
        yield report


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


def _report(metrics: Metrics, state: TrainState, version: str, *, started: float, tokens: int) -> StepReport:
    """Return the report of an optimizer step over rows of so many tokens."""
    if state.pending:
        metrics["train/rollouts_left_over"] = float(len({execution for execution, _ in state.pending}))
    metrics["train/step"] = float(state.step)
    seconds = time.perf_counter() - started
    timings = {"perf/train_time": seconds, "perf/actor_train_tok_per_s": tokens / seconds}
    return StepReport(state.step, state.rollout_id, version, metrics, timings=timings)
