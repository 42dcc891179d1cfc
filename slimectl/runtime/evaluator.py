"""Evaluates a run on held-out datasets when an evaluation is due, and records the results."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimectl.runtime.rollout_worker import RolloutService
from slimectl.runtime.run_parts import RunParts
from slimectl.stages.advantages import Models
from slimectl.stages.round_timer import EVALUATING
from slimectl.stages.run import leave_gpus
from slimectl.system.timeline import timeline
from slimectl.types import Metrics, Sample

if TYPE_CHECKING:
    from slimectl.engines.weight_sync.base import WeightSynchronizer


@dataclass
class Evaluator:
    """Evaluates the policy on every dataset of [eval], at most once per step.

    On the held-out datasets of its rounds, it measures the loss. On the others, engines sample responses and a verifier
    grades them.
    """

    parts: RunParts

    def __post_init__(self) -> None:
        has_evaluated = self.parts.state.rollout_id in (number for number, _ in self.parts.recorder.evaluations)
        self._newest = self.parts.state.place if has_evaluated else None
        """Round and step of the newest evaluation."""

    def before_rounds(self) -> None:
        """Evaluate at the start if eval.before_train is set, or if the last round's evaluation was abandoned."""
        number = self.parts.state.rollout_id
        if self.parts.settings.eval.before_train if number == 0 else self._is_due(number):
            self.evaluate()

    def after_round(self, number: int) -> None:
        """Evaluate if eval.interval divides the number of the round."""
        if self._is_due(number):
            self.evaluate()

    def evaluate(self) -> None:
        """Evaluate every dataset, record its metrics and write its samples, unless this step is already evaluated."""
        if not self.parts.settings.eval.data or self._newest == self.parts.state.place:
            return
        started, version = time.perf_counter(), self.parts.models.policy.weight_version
        samples_by_dataset: dict[str, list[Sample]] = {}
        with self.parts.progress.phase(EVALUATING):
            metrics = self.parts.rounds.held_out_metrics(self.parts.models)
        if self.parts.service is not None:
            assert self.parts.sync is not None, "engines have a synchronizer"
            dataset_metrics, samples_by_dataset = self._sample(self.parts.service, self.parts.sync, version)
            metrics |= dataset_metrics
        seconds = time.perf_counter() - started
        timeline.record("trainer", "eval", started, round=self.parts.state.rollout_id)
        with self.parts.grace.shielded():
            self.parts.recorder.record_evaluation(self.parts.state, version, metrics, seconds, samples_by_dataset)
            self._newest = self.parts.state.place

    def _sample(
        self, service: RolloutService, sync: WeightSynchronizer, version: str
    ) -> tuple[Metrics, dict[str, list[Sample]]]:
        """Sample and grade datasets. Return their metrics and samples."""
        models = Models(self.parts.models.policy, self.parts.models.critic, self.parts.models.frozen)
        leave_gpus(models, self.parts.settings, keep_weights=True)
        sync.wake()
        if sync.version != version:
            sync.push()
        leave_gpus(models, self.parts.settings)
        metrics: Metrics = {}
        samples_by_dataset: dict[str, list[Sample]] = {}
        for name in (name for name in self.parts.settings.eval.data if name not in self.parts.rounds.held_out):
            number = self.parts.state.rollout_id
            with self.parts.progress.phase(f"{EVALUATING} {name}"), timeline.block("evaluation", name, round=number):
                samples, dataset_metrics = service.sampler.evaluation(name, number)
            timeline.add(service.sampler.take_spans())
            metrics |= dataset_metrics
            samples_by_dataset[name] = samples
            if self.parts.settings.eval.keep_samples:
                out = self.parts.recorder.folder.path / "eval" / f"{name}-{number:06d}.jsonl"
                self.parts.recorder.keep_samples(out, samples)
        if self.parts.engines_sleep:
            sync.sleep()
        return metrics, samples_by_dataset

    def _is_due(self, number: int) -> bool:
        interval = self.parts.settings.eval.interval
        return bool(interval and number % interval == 0)
