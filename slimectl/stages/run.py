"""The main loop: alternates rollout, scoring and training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from slimectl.protocols import Executor, Sleeper, WeightSync
from slimectl.settings import Settings
from slimectl.settings.run import RunSettings
from slimectl.stages.advantages import Models
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.stages.round_timer import RoundTimer
from slimectl.stages.train import TrainState, train_batches
from slimectl.system.timeline import timeline
from slimectl.types import Metrics, RolloutBatch, StepReport


def run(
    rounds: Callable[[], Iterable[RolloutBatch]],
    models: Models,
    sync: WeightSync | None,
    settings: Settings,
    *,
    state: TrainState | None = None,
    hooks: Hooks = NO_HOOKS,
    waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[StepReport]:
    """Yield one report per optimizer step until the rounds end. When a report is yielded, the engine has its weights.

    `rounds` streams `sampled_rounds` from this process or another (see `streamed`). A round is sampled when training
    requests it, or earlier with `settings.run.async_level`. Its weights are then at most that many versions old, at one
    step per round. After the last step of a round, the loop waits for the next round inside `waiting()`. `sync` is None
    for recorded rounds, which no engine samples.
    """
    if sync is not None:
        leave_gpus(models, settings, keep_weights=True)
        if settings.cluster.colocate:
            sync.wake()
        sync.push()
        leave_gpus(models, settings)
    models = replace(models, updates_reference=sync is not None)
    timer = models.timer
    batches = _take_batches(rounds, sync, timer, waiting, colocate=settings.cluster.colocate)
    reports = train_batches(batches, models, settings, state=state, hooks=hooks)
    total_s = 0.0
    while True:  # the clock stops while the caller has a report, because it evaluates and saves
        started = timer.clock()
        report = next(reports, None)
        if report is None:
            return
        if report.last_step_of_round:
            if sync is not None:
                report.timings |= _update_engines(sync, models, report.rollout_id, settings, timer)
            report.timings |= timer.take(report.rollout_id)
        total_s += timer.clock() - started
        if report.last_step_of_round:
            report.timings |= _total_timings(total_s, report.timings.get("perf/wait_time", 0.0))
            total_s = 0.0
        yield report


def streamed(
    make_rounds: Callable[[], Iterator[RolloutBatch]], executor: Executor, run: RunSettings
) -> Callable[[], Iterator[RolloutBatch]]:
    """Return a function that streams rounds from an executor, up to one ahead with run.async_level."""
    return partial(executor.stream, make_rounds, ahead=min(1, run.async_level))


def _take_batches(
    rounds: Callable[[], Iterable[RolloutBatch]],
    sync: WeightSync | None,
    timer: RoundTimer,
    waiting: Callable[[], AbstractContextManager[Any]],
    *,
    colocate: bool,
) -> Iterator[RolloutBatch]:
    """Wait for each round of the executor's stream and yield it. Engines on the trainer's GPUs then sleep."""
    batches = iter(rounds())
    while True:
        with waiting(), timer.time("perf/wait_time"):
            batch = next(batches, None)
        if batch is None:
            return
        timeline.add(batch.spans)
        if sync is not None:
            if colocate:
                with timer.time("perf/engine_offload_time"):
                    sync.sleep()
            batch.timings |= _rollout_timings(batch.duration_s, len(batch.samples))
        yield batch


def _update_engines(
    sync: WeightSync, models: Models, rollout_id: int, settings: Settings, timer: RoundTimer
) -> Metrics:
    """Push the weights after a round if an update is due. Engines on the trainer's GPUs wake up, and models sleep."""
    if settings.cluster.colocate:
        leave_gpus(models, settings, keep_weights=True)
        with timer.time("perf/engine_onload_time"):
            sync.wake()
    elif rollout_id % settings.sync.update_weights_interval:
        return {}
    with timer.time("perf/update_weights_time", of=models.policy):
        sync_metrics = sync.push()
    leave_gpus(models, settings)
    return {f"perf/update_weights_{name}": value for name, value in sync_metrics.items()}


def _total_timings(total_s: float, wait_s: float) -> Metrics:
    """Return the time of a round, and the share spent waiting for samples."""
    return {"perf/total_time": total_s, "perf/wait_time_ratio": wait_s / total_s if total_s else 0.0}


def leave_gpus(models: Models, settings: Settings, *, keep_weights: bool = False) -> None:
    """Move the models off the GPUs that they share with engines, if any, where engines are about to sample.

    With `keep_weights`, the policy keeps its weights there until they are pushed.
    """
    if not (settings.cluster.colocate and settings.cluster.offload_train):
        return
    for model in (models.policy, models.critic, *models.frozen.values()):
        if isinstance(model, Sleeper):
            model.sleep(keep_weights=keep_weights and model is models.policy)


def _rollout_timings(duration_s: float, samples: int) -> Metrics:
    return {
        "perf/rollout_time": duration_s,
        "rollout/generation_time": duration_s,
        "rollout/samples_per_second": samples / duration_s if duration_s else 0.0,
    }
