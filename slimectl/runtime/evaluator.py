"""Evaluates a run on held-out datasets when an evaluation is due, and records the results."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimectl.protocols import Progress
from slimectl.runtime.grace import GracePeriod
from slimectl.runtime.recorder import RunRecorder
from slimectl.runtime.rollout_worker import RolloutService
from slimectl.runtime.rounds import RecordedRounds, SampledRounds
from slimectl.runtime.run_parts import RunParts
from slimectl.settings import Settings
from slimectl.stages.round_timer import EVALUATING
from slimectl.stages.train import TrainState
from slimectl.types import Metrics, Sample

if TYPE_CHECKING:
    from slimectl.engines.weight_sync.base import WeightSynchronizer


@dataclass
class Evaluator:
    """Evaluates the policy on every dataset of [eval], at most once per step.

    On the held-out datasets of `rounds`, it measures the loss. On the others, engines sample responses and a verifier
    grades them. `state` is the run's state, which training updates.
    """

    settings: Settings
    rounds: SampledRounds | RecordedRounds
    parts: RunParts
    recorder: RunRecorder
    state: TrainState
    grace: GracePeriod
    progress: Progress

    def __post_init__(self) -> None:
        has_evaluated = self.state.rollout_id in (number for number, _ in self.recorder.evaluations)
        self._newest = self.state.place if has_evaluated else None
        """Round and step of the newest evaluation."""

    def before_rounds(self) -> None:
        """Evaluate at the start if eval.before_train is set, or if the last round's evaluation was abandoned."""
        number = self.state.rollout_id
        if self.settings.eval.before_train if number == 0 else self._is_due(number):
            self.evaluate()

    def after_round(self, number: int) -> None:
        """Evaluate if eval.interval divides the number of the round."""
        if self._is_due(number):
            self.evaluate()

    def evaluate(self) -> None:
        """Evaluate every dataset, record its metrics and write its samples, unless this step is already evaluated."""
        if not self.settings.eval.data or self._newest == self.state.place:
            return
        started, version = time.perf_counter(), self.parts.models.policy.weight_version
        samples_by_dataset: dict[str, list[Sample]] = {}
        with self.progress.phase(EVALUATING):
            metrics = self.rounds.held_out_metrics(self.parts.models)
        if self.parts.service is not None:
            assert self.parts.sync is not None, "engines have a synchronizer"
            dataset_metrics, samples_by_dataset = self._sample(self.parts.service, self.parts.sync, version)
            metrics |= dataset_metrics
        seconds = time.perf_counter() - started
        with self.grace.shielded():
            self.recorder.record_evaluation(self.state, version, metrics, seconds, samples_by_dataset)
            self._newest = self.state.place

    def _sample(
        self, service: RolloutService, sync: WeightSynchronizer, version: str
    ) -> tuple[Metrics, dict[str, list[Sample]]]:
        """Sample and grade datasets. Return their metrics and samples."""
        if self.parts.engines_sleep:
            sync.wake()
        if sync.version != version:
            sync.push()
        metrics: Metrics = {}
        samples_by_dataset: dict[str, list[Sample]] = {}
        for name in (name for name in self.settings.eval.data if name not in self.rounds.held_out):
            with self.progress.phase(f"{EVALUATING} {name}"):
                samples, dataset_metrics = service.sampler.evaluation(name, self.state.rollout_id)
            metrics |= dataset_metrics
            samples_by_dataset[name] = samples
            if self.settings.eval.keep_samples:
                out = self.recorder.folder.path / "eval" / f"{name}-{self.state.rollout_id:06d}.jsonl"
                self.recorder.keep_samples(out, samples)
        if self.parts.engines_sleep:
            sync.sleep()
        return metrics, samples_by_dataset

    def _is_due(self, number: int) -> bool:
        interval = self.settings.eval.interval
        return bool(interval and number % interval == 0)
