"""The main loop: alternates rollout, scoring and training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from slimectl.protocols import Critic, Executor, LogProbModel, Policy, WeightSync
from slimectl.settings import Settings
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.stages.rounds import Clock
from slimectl.stages.score import attach_log_probs
from slimectl.stages.train import TrainState, train_batches
from slimectl.types import Metrics, RolloutBatch, StepReport


def run(
    make_rounds: Callable[[], Iterator[RolloutBatch]],
    policy: Policy,
    sync: WeightSync,
    settings: Settings,
    *,
    executor: Executor,
    reference: Policy | None = None,
    teacher: LogProbModel | None = None,
    critic: Critic | None = None,
    state: TrainState | None = None,
    hooks: Hooks = NO_HOOKS,
    clock: Clock = time.perf_counter,
) -> Iterator[StepReport]:
    """Yield one report per optimizer step, until the rounds end; the engine has the new weights by then.

    `make_rounds` returns `sampled_rounds`, in this process or another. A round is sampled when training requests it,
    or earlier with `settings.run.async_level`: its weights are then at most that many versions old, at one step per
    round.
    """

    def prepared_batches() -> Iterator[RolloutBatch]:
        batches = executor.stream(make_rounds, ahead=min(1, settings.run.async_level))
        wait_start = clock()
        for batch in batches:
            waited = clock() - wait_start
            if colocated:
                sync.sleep()
            batch.timings = _rollout_timings(batch.duration_s, len(batch.samples), waited)
            if reference is not None:  # which may have moved since the batch was scored
                batch.samples = list(attach_log_probs(batch.samples, reference, "ref_log_probs", again=True))
            if teacher is not None:
                batch.samples = list(attach_log_probs(batch.samples, teacher, "teacher_log_probs"))
            yield batch
            wait_start = clock()

    colocated = settings.cluster.colocate
    sync.push()
    round_start = clock()
    for report in train_batches(prepared_batches(), policy, settings, critic=critic, state=state, hooks=hooks):
        if report.last_step_of_round:
            if colocated:
                sync.wake()
            if colocated or report.rollout_id % settings.sync.update_weights_interval == 0:
                report.timings |= _push_weights(sync, clock)
            total, round_start = clock() - round_start, clock()
            report.timings["perf/total_time"] = total
            report.timings["perf/wait_time_ratio"] = report.timings.get("perf/wait_time", 0.0) / total if total else 0.0
        yield report


def _rollout_timings(duration_s: float, samples: int, waited_s: float) -> Metrics:
    return {
        "perf/rollout_time": duration_s,
        "perf/wait_time": waited_s,
        "rollout/generation_time": duration_s,
        "rollout/samples_per_second": samples / duration_s if duration_s else 0.0,
    }


def _push_weights(sync: WeightSync, clock: Clock) -> Metrics:
    started = clock()
    sync_metrics = sync.push()
    metrics = {f"perf/update_weights_{name}": value for name, value in sync_metrics.items()}
    return metrics | {"perf/update_weights_time": clock() - started}
