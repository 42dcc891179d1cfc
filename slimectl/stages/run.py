"""The main loop: alternates rollout, scoring and training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from slimectl.protocols import Critic, Executor, LogProbModel, Policy, Sleeper, WeightSync
from slimectl.settings import Settings
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.stages.round_timer import RoundTimer
from slimectl.stages.score import attach_log_probs
from slimectl.stages.train import TrainState, train_batches
from slimectl.types import Metrics, RolloutBatch, StepReport


def run(
    make_rounds: Callable[[], Iterator[RolloutBatch]],
    policy: Policy,
    sync: WeightSync | None,
    settings: Settings,
    *,
    executor: Executor,
    reference: Policy | None = None,
    teacher: LogProbModel | None = None,
    critic: Critic | None = None,
    state: TrainState | None = None,
    hooks: Hooks = NO_HOOKS,
    timer: RoundTimer | None = None,
    waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[StepReport]:
    """Yield one report per optimizer step until the rounds end. When a report is yielded, the engine has its weights.

    `make_rounds` returns `sampled_rounds`, in this process or another. A round is sampled when training requests it,
    or earlier with `settings.run.async_level`. Its weights are then at most that many versions old, at one step per
    round. After the last step of a round, the loop waits for the next round inside `waiting()`. `sync` is None for
    recorded rounds, which no engine samples. `timer` measures the times of the run.
    """
    timer = timer or RoundTimer()
    is_freed = settings.cluster.colocate and settings.cluster.offload_train
    sleepers = (policy, critic, reference, teacher) if is_freed else ()
    if sync is not None:
        sync.push()
        _sleep(sleepers)
    batches = _take_batches(make_rounds, executor, sync, settings, timer, waiting)
    batches = _with_log_probs(batches, reference, teacher, settings, timer)
    reports = train_batches(batches, policy, settings, critic=critic, state=state, hooks=hooks, timer=timer)
    total_s = 0.0
    while True:  # the clock stops while the caller has a report, because it evaluates and saves
        started = timer.clock()
        report = next(reports, None)
        if report is None:
            return
        if report.last_step_of_round:
            if sync is not None:
                report.timings |= _update_engines(sync, policy, sleepers, report.rollout_id, settings, timer)
            report.timings |= timer.take()
        total_s += timer.clock() - started
        if report.last_step_of_round:
            report.timings |= _total_timings(total_s, report.timings.get("perf/wait_time", 0.0))
            total_s = 0.0
        yield report


def _take_batches(
    make_rounds: Callable[[], Iterator[RolloutBatch]],
    executor: Executor,
    sync: WeightSync | None,
    settings: Settings,
    timer: RoundTimer,
    waiting: Callable[[], AbstractContextManager[Any]],
) -> Iterator[RolloutBatch]:
    """Wait for each round of the executor's stream and yield it. Engines on the trainer's GPUs then sleep."""
    batches = iter(executor.stream(make_rounds, ahead=min(1, settings.run.async_level)))
    while True:
        with waiting(), timer.time("perf/wait_time"):
            batch = next(batches, None)
        if batch is None:
            return
        if sync is not None:
            if settings.cluster.colocate:
                with timer.time("perf/engine_offload_time"):
                    sync.sleep()
            batch.timings |= _rollout_timings(batch.duration_s, len(batch.samples))
        yield batch


def _with_log_probs(
    batches: Iterable[RolloutBatch],
    reference: Policy | None,
    teacher: LogProbModel | None,
    settings: Settings,
    timer: RoundTimer,
) -> Iterator[RolloutBatch]:
    """Yield rounds with the log-probabilities of the reference and the teacher.

    The reference's are recomputed, because it may have changed since the rounds were scored.
    """
    for batch in batches:
        if reference is not None:
            with timer.time("perf/ref_log_probs_time", of=reference):
                batch.samples = list(
                    attach_log_probs(
                        batch.samples, reference, "ref_log_probs", recompute=True,
                        temperature=settings.policy_temperature,
                    )
                )  # fmt: skip
        if teacher is not None:
            with timer.time("perf/teacher_log_probs_time", of=teacher):
                batch.samples = list(attach_log_probs(batch.samples, teacher, "teacher_log_probs"))
        yield batch


def _update_engines(
    sync: WeightSync,
    policy: Policy,
    sleepers: Iterable[object],
    rollout_id: int,
    settings: Settings,
    timer: RoundTimer,
) -> Metrics:
    """Push the weights after a round if an update is due. Engines on the trainer's GPUs wake up, and models sleep."""
    colocated = settings.cluster.colocate
    if colocated:
        _sleep(sleepers, keep_weights_of=policy)
        with timer.time("perf/engine_onload_time"):
            sync.wake()
    elif rollout_id % settings.sync.update_weights_interval:
        return {}
    with timer.time("perf/update_weights_time", of=policy):
        sync_metrics = sync.push()
    _sleep(sleepers)
    return {f"perf/update_weights_{name}": value for name, value in sync_metrics.items()}


def _total_timings(total_s: float, wait_s: float) -> Metrics:
    """Return the time of a round, and the share spent waiting for samples."""
    return {"perf/total_time": total_s, "perf/wait_time_ratio": wait_s / total_s if total_s else 0.0}


def _sleep(models: Iterable[object], *, keep_weights_of: object = None) -> None:
    """Move the models off the GPUs, where engines sample. One model keeps its weights there until they are pushed."""
    for model in models:
        if isinstance(model, Sleeper):
            model.sleep(keep_weights=model is keep_weights_of)


def _rollout_timings(duration_s: float, samples: int) -> Metrics:
    return {
        "perf/rollout_time": duration_s,
        "rollout/generation_time": duration_s,
        "rollout/samples_per_second": samples / duration_s if duration_s else 0.0,
    }
