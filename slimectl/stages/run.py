"""The loop: rollout, score and train, chained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from slimectl.data.buffer import SamplingState
from slimectl.ports import Critic, Executor, LogProbs, Policy
from slimectl.settings import Settings
from slimectl.stages.rounds import Clock
from slimectl.stages.teaching import with_log_probs
from slimectl.stages.train import TrainState, train_rounds
from slimectl.types import Metrics, Round, Sample, StepReport


class WeightSync(Protocol):
    """Carries the policy's weights to the engine."""

    def push(self) -> Metrics:
        """What it took, by name: "bytes" and whatever else there is to say."""
        ...

    def sleep(self) -> None:
        """The engines give back their memory: the trainer needs it, and nothing will be asked of them."""
        ...

    def wake(self) -> None:
        """They take it again; their weights come with the next push."""
        ...


def run(
    make_rounds: Callable[[], Iterator[Round]],
    policy: Policy,
    sync: WeightSync,
    settings: Settings,
    *,
    executor: Executor,
    reference: Policy | None = None,
    teacher: LogProbs | None = None,
    critic: Critic | None = None,
    state: TrainState | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[StepReport]:
    """One report per optimizer step, until the rounds end; the engine has the new weights when it arrives.

    `make_rounds` gives `sampled_rounds`, wherever they are made. Each is made when training asks for it, or, with
    `settings.run.ahead`, before: the weights of its answers are at most that many versions old, for a step a round.
    """
    perf: dict[int, Metrics] = {}
    left_out: dict[int, Metrics] = {}
    here: SamplingState | None = None
    shared = settings.cluster.colocate

    def arriving() -> Iterator[list[Sample]]:
        nonlocal here
        coming = executor.stream(make_rounds, ahead=min(1, settings.run.ahead))
        asked = clock()
        for made in coming:
            waited = clock() - asked
            if shared:
                sync.sleep()
            samples = made.samples
            if reference is not None:
                samples = list(with_log_probs(samples, reference, "ref_log_probs", again=True))
            if teacher is not None:
                samples = list(with_log_probs(samples, teacher, "teacher_log_probs"))
            here = made.state
            left_out[id(samples[0])] = made.metrics
            perf[id(samples[0])] = {
                "perf/rollout_time": made.seconds,
                "perf/wait_time": waited,
                "rollout/generation_time": made.seconds,
                "rollout/samples_per_second": len(samples) / made.seconds if made.seconds else 0.0,
            }
            yield samples
            asked = clock()

    sync.push()
    begun = clock()
    for report in train_rounds(arriving(), policy, settings, critic=critic, state=state):
        report.sampling = here
        if report.samples:
            report.perf |= perf.pop(id(report.samples[0]), {})
            report.metrics |= left_out.pop(id(report.samples[0]), {})
        if report.ends_round:
            if shared:
                sync.wake()
            if shared or report.rollout_id % settings.sync.update_weights_interval == 0:
                report.perf |= _pushed(sync, clock)
            total, begun = clock() - begun, clock()
            report.perf["perf/total_time"] = total
            report.perf["perf/wait_time_ratio"] = report.perf.get("perf/wait_time", 0.0) / total if total else 0.0
        yield report


def _pushed(sync: WeightSync, clock: Clock) -> Metrics:
    started = clock()
    told = sync.push()
    taken = {f"perf/update_weights_{name}": value for name, value in told.items()}
    return taken | {"perf/update_weights_time": clock() - started}
