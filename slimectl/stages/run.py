"""The main loop: alternates rollout, scoring and training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from slimectl.protocols import Critic, Executor, LogProbModel, Policy
from slimectl.settings import Settings
from slimectl.stages.rounds import Clock
from slimectl.stages.score import attach_log_probs
from slimectl.stages.train import TrainState, train_rounds
from slimectl.types import Metrics, RolloutBatch, Sample, SamplerState, StepReport


class WeightSync(Protocol):
    """Transfers the policy's weights to the engine."""

    def push(self) -> Metrics:
        """Push the weights and return metrics of the transfer: "bytes" and others."""
        ...

    def sleep(self) -> None:
        """Release the engines' GPU memory for the trainer; they get no requests until `wake`."""
        ...

    def wake(self) -> None:
        """Allocate the engines' GPU memory again; the next push loads their weights."""
        ...


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
    clock: Clock = time.perf_counter,
) -> Iterator[StepReport]:
    """Yield one report per optimizer step, until the rounds end; the engine has the new weights by then.

    `make_rounds` returns `sampled_rounds`, in this process or another. A round is sampled when training requests it,
    or earlier with `settings.run.async_level`: its weights are then at most that many versions old, at one step per
    round.
    """
    perf: dict[int, Metrics] = {}
    round_metrics: dict[int, Metrics] = {}
    sampling_state: SamplerState | None = None
    colocated = settings.cluster.colocate

    def prepared_rounds() -> Iterator[list[Sample]]:
        nonlocal sampling_state
        batches = executor.stream(make_rounds, ahead=min(1, settings.run.async_level))
        wait_start = clock()
        for batch in batches:
            waited = clock() - wait_start
            if colocated:
                sync.sleep()
            samples = batch.samples
            if reference is not None:
                samples = list(attach_log_probs(samples, reference, "ref_log_probs", again=True))
            if teacher is not None:
                samples = list(attach_log_probs(samples, teacher, "teacher_log_probs"))
            sampling_state = batch.state
            round_metrics[id(samples[0])] = batch.metrics
            perf[id(samples[0])] = {
                "perf/rollout_time": batch.seconds,
                "perf/wait_time": waited,
                "rollout/generation_time": batch.seconds,
                "rollout/samples_per_second": len(samples) / batch.seconds if batch.seconds else 0.0,
            }
            yield samples
            wait_start = clock()

    sync.push()
    round_start = clock()
    for report in train_rounds(prepared_rounds(), policy, settings, critic=critic, state=state):
        report.sampling = sampling_state
        if report.samples:
            report.perf |= perf.pop(id(report.samples[0]), {})
            report.metrics |= round_metrics.pop(id(report.samples[0]), {})
        if report.ends_round:
            if colocated:
                sync.wake()
            if colocated or report.rollout_id % settings.sync.update_weights_interval == 0:
                report.perf |= _push_weights(sync, clock)
            total, round_start = clock() - round_start, clock()
            report.perf["perf/total_time"] = total
            report.perf["perf/wait_time_ratio"] = report.perf.get("perf/wait_time", 0.0) / total if total else 0.0
        yield report


def _push_weights(sync: WeightSync, clock: Clock) -> Metrics:
    started = clock()
    sync_metrics = sync.push()
    metrics = {f"perf/update_weights_{name}": value for name, value in sync_metrics.items()}
    return metrics | {"perf/update_weights_time": clock() - started}
