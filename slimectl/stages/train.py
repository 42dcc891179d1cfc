"""Scored samples in, new weights out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import cast

from slimectl.algorithms.losses import PolicyLoss
from slimectl.algorithms.statistics import rollout_metrics
from slimectl.algorithms.values import SharedLoss, ValueLoss
from slimectl.ports import Critic, Policy, Stepped
from slimectl.settings import Settings
from slimectl.settings.algorithm import Pairwise, PolicyGradient, Ppo, RewardModel, critic_is_shared
from slimectl.stages import own_rows
from slimectl.stages.critic import critic_step, explained
from slimectl.stages.custom import CustomLoss, custom_advantages, own_policy_loss
from slimectl.stages.finite import FiniteCheck
from slimectl.stages.objective import loss_of, policy_rows, require_groups, sft_rows, weigh
from slimectl.stages.preferences import paired_rows, sample_ids, set_slopes
from slimectl.stages.round_metrics import round_metrics, row_metrics, sample_counts
from slimectl.stages.score import reward_number
from slimectl.types import Metrics, Row, Sample, Status, StepReport

ALSO = {"pg_clipfrac": "clipfrac", "kl_loss": "kl"}
"""Metrics that people look for under a second name."""


@dataclass
class TrainState:
    """Where training stands: what a checkpoint keeps besides weights and optimizer."""

    step: int = 0
    """Optimizer steps taken, or tried: a round without any signal counts as one."""

    rollout_id: int = 0
    """Rounds begun."""

    pending: list[tuple[int, Row]] = field(default_factory=list)
    """Rollouts (by execution) that did not fill a step of train.global_batch_size; the next step begins with them."""


@dataclass(frozen=True)
class Learners:
    """What a step moves: the policy, and its critic where there is one."""

    policy: Policy
    critic: Critic | None = None


def train(
    samples: Iterable[Sample],
    policy: Policy,
    settings: Settings,
    *,
    critic: Critic | None = None,
    state: TrainState | None = None,
) -> Iterator[StepReport]:
    """Learn from samples, round by round; one report per optimizer step.

    A round is `settings.rollouts_per_round` rollouts: advantages need whole groups. Nothing beyond a round is pulled
    before its steps are done and reported, so a lazy source is sampled on-policy (only where a rollout came as several
    samples, the one after the last is looked at). Samples left over at the end make a last, smaller step. Raises
    RecordError for samples that this algorithm cannot learn from. ppo needs a `critic`; a reward model is one, and
    stands for the policy too. Where answers are compared in pairs, a round is run.rollout_batch_size groups.
    """
    if isinstance(settings.algorithm, Pairwise):
        rounds = _groups(samples, settings.train.global_batch_size or settings.run.rollout_batch_size)
    else:
        rounds = _rounds(samples, settings.rollouts_per_round)
    yield from train_rounds(rounds, policy, settings, critic=critic, state=state)


def train_rounds(
    rounds: Iterable[list[Sample]],
    policy: Policy,
    settings: Settings,
    *,
    critic: Critic | None = None,
    state: TrainState | None = None,
) -> Iterator[StepReport]:
    """The same, from rounds that are known as such."""
    state = state or TrainState()
    learners = Learners(policy, cast(Critic, policy) if critic_is_shared(settings.algorithm) else critic)
    for samples in rounds:
        state.rollout_id += 1
        yield from _round(samples, learners, settings, state)
    if state.pending:
        rows, state.pending = state.pending, []
        state.step += 1
        yield _step(rows, learners, settings, state, {}, [])


def _rounds(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Lists of `size` whole rollouts; the samples of one that fanned out stand together and share their rollout_id."""
    batch: list[Sample] = []
    count = 0
    for sample in samples:
        goes_on = bool(batch) and sample.rollout_id is not None and sample.rollout_id == batch[-1].rollout_id
        if count == size and not goes_on:
            yield batch
            batch, count = [], 0
        batch.append(sample)
        count += not goes_on
        if count == size and sample.rollout_id is None:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


def _groups(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Lists of `size` whole groups, whose samples stand together."""
    batch: list[list[Sample]] = []
    for _, group in groupby(samples, key=lambda sample: sample.group_index):
        batch.append(list(group))
        if len(batch) == size:
            yield [sample for members in batch for sample in members]
            batch = []
    if batch:
        yield [sample for members in batch for sample in members]


def _round(samples: list[Sample], learners: Learners, settings: Settings, state: TrainState) -> Iterator[StepReport]:
    started = time.perf_counter()
    metrics: Metrics = {}
    given, shaped = own_rows.reshaped(samples, settings)
    made = _rows(given, learners, settings, metrics, state.rollout_id, rewards=shaped and shaped[1])
    logged = shaped is not None and len(given) == len(samples)
    rewards = [reward_number(s, settings.score.reward_key) for s in samples if s.reward is not None]
    rewards = shaped[0] if shaped and logged else rewards
    metrics |= rollout_metrics(samples, rewards) | round_metrics(samples, rewards, settings)
    metrics |= own_rows.reward_metrics(shaped[1]) if shaped else {}
    state.pending += made
    waiting = [row for _, row in state.pending]
    steps = list(_steps(state, settings))
    if isinstance(settings.algorithm, PolicyGradient):
        moves_on = len(steps) > 1 or bool(state.pending) or settings.algorithm.tis_batch_normalize
        _fix_old_log_probs(waiting, learners.policy, moves_on=moves_on)
    metrics |= row_metrics([row for _, row in made])
    perf = {"perf/data_preprocess_time": time.perf_counter() - started}
    for i, chosen in enumerate(steps or [[]]):
        state.step += 1
        report = _step(
            chosen, learners, settings, state, metrics if i == 0 else {}, samples if i == 0 else [], step_id=i
        )
        report.perf |= perf if i == 0 else {}
        report.ends_round = i == max(0, len(steps) - 1)
        yield report


def _rows(
    samples: list[Sample],
    learners: Learners,
    settings: Settings,
    metrics: Metrics,
    rollout_id: int,
    *,
    rewards: Sequence[float] | None,
) -> list[tuple[int, Row]]:
    """What of a round is trained on, as rows that lack nothing but the weights of their step, each with its rollout.

    `rewards` given are already what becomes advantages.
    """
    policy, algorithm, key = learners.policy, settings.algorithm, settings.score.reward_key
    kept = _fresh(samples, int(policy.weight_version), settings.run.max_staleness, metrics)
    if isinstance(algorithm, Pairwise):
        return paired_rows(kept, algorithm, reward_key=key, metrics=metrics)
    rows = sft_rows(kept)
    if isinstance(algorithm, PolicyGradient):
        require_groups(samples, algorithm)
        own = settings.train.custom_advantage_function_path is not None
        kept, rows = policy_rows(
            kept,
            algorithm,
            reward_key=key,
            metrics=metrics,
            log_probs=policy.log_probs,
            critic=learners.critic,
            custom=partial(custom_advantages, settings=settings) if own else None,
            shaped=None if rewards is None else {id(s): r for s, r in zip(samples, rewards, strict=True)},
        )
        if settings.rollout.data_postprocess_path is not None:
            _fix_old_log_probs(rows, policy, moves_on=True)
            numbers = [reward_number(sample, key) for sample in kept]
            own_rows.postprocess(rows, kept, numbers, settings, rollout_id)
    return list(zip((sample.execution for sample in kept), rows, strict=True))


def _fix_old_log_probs(rows: list[Row], policy: Policy, *, moves_on: bool) -> None:
    """Write down whose probabilities the ratio is taken against, where the policy `moves_on` before all are used.

    Where all rows are new and make one step, the policy is still the one of the old pass, and the loss takes its own
    values without gradient: the same numbers for one forward pass less.
    """
    lacking = [row for row in rows if row.old_log_probs is None]
    if lacking and (moves_on or len(lacking) < len(rows)):
        for row, log_probs in zip(lacking, policy.log_probs(lacking), strict=True):
            row.old_log_probs = log_probs


def _fresh(samples: list[Sample], version: int, max_staleness: int | None, metrics: Metrics) -> list[Sample]:
    """The samples that are not failed and not staler than allowed; how stale they are goes to the metrics."""
    ages = {id(sample): age for sample in samples if (age := _age(sample, version)) is not None}
    if ages:
        metrics["rollout/staleness/mean"] = sum(ages.values()) / len(ages)
        metrics["rollout/staleness/max"] = float(max(ages.values()))
    kept = [sample for sample in samples if sample.status is not Status.FAILED]
    if max_staleness is None:
        return kept
    young = [sample for sample in kept if ages.get(id(sample), 0) <= max_staleness]
    if len(young) < len(kept):
        metrics["rollout/dynamic_filter/drop_stale"] = float(len(kept) - len(young))
    return young


def _age(sample: Sample, version: int) -> int | None:
    """Weight versions between the oldest part of a sample and now; None for samples from elsewhere."""
    versions = sample.weight_versions
    if not versions or not all(given.isdecimal() for given in versions):
        return None
    # A policy that starts anew from a trained checkpoint counts from 0 again: its own samples are not from the future.
    return max(0, version - min(map(int, versions)))


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
    learners: Learners,
    settings: Settings,
    state: TrainState,
    metrics: Metrics,
    samples: list[Sample],
    *,
    step_id: int = 0,
) -> StepReport:
    """One optimizer step over rows; none is taken where nothing carries signal."""
    started = time.perf_counter()
    metrics = dict(metrics)
    rows = [row for _, row in chosen]
    if rows:
        executions = [execution for execution, _ in chosen]
        weigh(rows, executions, settings.algorithm)
        if settings.megatron.custom_before_train_step_hook_path is not None:
            cast(Stepped, learners.policy).before_step(state.rollout_id, step_id)
        metrics |= sample_counts(rows) | _learnt(rows, executions, learners, settings, state)
        metrics["train/global_batch_size"] = float(len(set(executions)))
    if state.pending:
        metrics["train/rollouts_left_over"] = float(len({execution for execution, _ in state.pending}))
    metrics["train/step"] = float(state.step)
    if samples:
        metrics["rollout/step"] = float(state.rollout_id)
    seconds = time.perf_counter() - started
    tokens = sum(len(row.tokens) for row in rows)
    perf = {"perf/train_time": seconds, "perf/actor_train_tok_per_s": tokens / seconds}
    return StepReport(state.step, state.rollout_id, learners.policy.weight_version, metrics, samples, perf)


def _learnt(
    rows: list[Row], executions: list[int], learners: Learners, settings: Settings, state: TrainState
) -> Metrics:
    """Make one update of everything that learns from weighed rows, and return its metrics. Raises DivergedError."""
    policy, critic, algorithm = learners.policy, learners.critic, settings.algorithm
    finite = FiniteCheck(rows, sample_ids(executions, algorithm), state.rollout_id, state.step)
    outputs = critic.values if isinstance(algorithm, RewardModel) and critic is not None else policy.log_probs
    preferred: Metrics = {}
    if isinstance(algorithm, Pairwise):
        preferred = set_slopes(rows, algorithm, policy, critic)
        finite.check(preferred, "train/loss", of="the pairs'", outputs=outputs)
    finite.check_rows()
    metrics: Metrics = {}
    if isinstance(algorithm, Ppo):
        assert critic is not None
        metrics = explained(rows) if critic_is_shared(algorithm) else critic_step(rows, critic, algorithm, finite)
        if state.step <= algorithm.num_critic_only_steps:
            return metrics
    own = settings.train.custom_loss_function_path is not None and isinstance(algorithm, PolicyGradient)
    loss = CustomLoss(settings) if own else loss_of(algorithm, rows)
    if isinstance(loss, PolicyLoss):
        loss = own_policy_loss(loss, rows, executions, settings)
    if isinstance(algorithm, Ppo) and critic_is_shared(algorithm):
        loss = SharedLoss(loss, ValueLoss(algorithm.value_clip), algorithm.value_coef)
    summed = finite.update(policy, loss, of="the", outputs=outputs)
    summed |= {also: summed[name] for name, also in ALSO.items() if name in summed}
    return metrics | {f"train/{name}": value for name, value in summed.items()} | preferred
