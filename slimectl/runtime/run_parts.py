"""Builds the parts of a training run: models, engines and weight updates."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slimectl.plugins.garbage import collection_paused, frozen_objects
from slimectl.protocols import Executor, Progress
from slimectl.runtime import builders
from slimectl.runtime.grace import GracePeriod
from slimectl.runtime.initial_model import SftWarmup, prepare_model
from slimectl.runtime.process_memory import keep_freed_memory
from slimectl.runtime.profiling import RoundProfiler
from slimectl.runtime.recorder import RunRecorder
from slimectl.runtime.rollout_worker import RolloutService
from slimectl.runtime.rounds import RecordedRounds, SampledRounds
from slimectl.settings import Settings
from slimectl.stages.train import TrainState

if TYPE_CHECKING:
    from slimectl.engines.weight_sync.base import WeightSynchronizer


@dataclass(frozen=True)
class RunContext:
    """What a run reads, what it records and reports to, and what may end it. `state` is updated by training."""

    rounds: SampledRounds | RecordedRounds
    recorder: RunRecorder
    state: TrainState
    interrupted: Callable[[], bool]
    grace: GracePeriod
    progress: Progress

    @property
    def settings(self) -> Settings:
        return self.recorder.settings


@dataclass(frozen=True)
class RunParts(RunContext):
    """Models, engines and weight updates of a run. Training from samples has engines only for evaluations."""

    model: Path
    """Folder of the initial model, before any warm-up."""
    models: builders.TrainableModels
    """Policy, critic, reference and teacher."""
    periodic_reference: builders.PeriodicReference
    service: RolloutService | None
    sync: WeightSynchronizer | None
    """None without a `service`."""
    engines_sleep: bool
    """Whether engines on the trainer's GPUs sleep between evaluations, because no round is sampled meanwhile."""
    profiler: RoundProfiler


def build_parts(run: RunContext, ending: ExitStack, executor: Executor) -> RunParts:
    """Build the engines, if any, and the models with the weights of the checkpoint that the recorder rewound to.

    A new model is created and warmed up on labels first. `ending` closes the parts in reverse order.
    """
    recorder, progress, rounds = run.recorder, run.progress, run.rounds
    settings, folder = recorder.settings, recorder.folder
    keep_freed_memory()
    ending.callback(gc.unfreeze)
    with frozen_objects():
        model = prepare_model(settings, folder)
        service = rounds.service(model, executor=executor, folder=folder.path)
    if service is not None:
        ending.callback(service.close)
        service.report_to(progress)
    warmup = SftWarmup(recorder, executor, run.interrupted)
    with progress.phase("warm-up" if settings.sft_warmup.data else "loading"):
        model_folder = warmup.run(model, service)
    if service is not None and settings.cluster.colocate:
        service.sleep()
    with collection_paused():
        models = rounds.models(model_folder, executor=executor)
    ending.callback(models.close)
    recorder.critic = models.separate_critic
    recorder.load(models.policy, total_steps=models.total_steps)
    periodic_reference = builders.PeriodicReference(
        settings.algorithm.reference_interval, models.reference, folder.path
    )
    periodic_reference.resume(run.state.rollout_id)
    engines_sleep = settings.cluster.colocate and not rounds.samples
    sync = None
    if service is not None:
        sync = service.sync(models.policy)
        ending.callback(sync.close)
    profiler = RoundProfiler(
        settings.run.profile,
        folder.path,
        policy=models.policy,
        critic=models.separate_critic,
        reference=models.reference,
    )
    ending.callback(profiler.close)  # writes the traces even if the run ends early
    return RunParts(**vars(run), model=model, models=models, periodic_reference=periodic_reference, service=service,
                    sync=sync, engines_sleep=engines_sleep, profiler=profiler)  # fmt: skip
