"""Records a run (metrics, samples, evaluations, checkpoints) and restores it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slimectl.data.jsonl import write_samples
from slimectl.data.records import sampler_state_from_json, sampler_state_to_json
from slimectl.data.run_dir import RunDir, storage_errors, write_text
from slimectl.errors import CheckpointError
from slimectl.protocols import Critic, Policy, Tracker
from slimectl.settings import Settings
from slimectl.stages.evaluate import resolve_dataset_settings, table_of
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.stages.metrics import round_perf
from slimectl.stages.train import TrainState
from slimectl.types import Metrics, Sample, SamplerState, StepReport, TrainingSample


class RunRecorder:
    """Recorder of one run.

    metrics.jsonl has only deterministic values, so that a resumed run writes the same bytes as an uninterrupted one;
    timings go to perf.jsonl.
    """

    def __init__(self, folder: RunDir, settings: Settings, hooks: Hooks = NO_HOOKS) -> None:
        self.folder = folder
        self.settings = settings
        self.hooks = hooks
        self.trackers: Sequence[Tracker] = ()
        self.sampling = SamplerState()
        """State of sampling after the last round."""
        self.critic: Critic | None = None
        """Saved and restored with the policy."""
        self.scores: list[tuple[int, float]] = []
        """(round, mean reward), for the curve."""
        self.evaluations: list[tuple[int, Metrics]] = []
        """(round, metrics) of every evaluation, oldest first."""
        self._round: Sequence[Sample] = ()
        """The samples of the round whose steps are being recorded."""

    def append(self, name: str, line: dict[str, Any]) -> None:
        path = self.folder.path / name
        with storage_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def record(self, report: StepReport) -> None:
        """Record one optimizer step."""
        self._round = report.samples or self._round
        gpus = self.settings.cluster.rollout_num_gpus or self.settings.num_engines
        report.timings |= round_perf(self._round, report.timings, gpus=gpus)
        self.append("metrics.jsonl", report.to_json())
        self.append("perf.jsonl", {"step": report.step, "metrics": report.timings})
        if "rollout/raw_reward" in report.metrics:
            self.scores.append((report.rollout_id, report.metrics["rollout/raw_reward"]))
        tracked = report.metrics | report.timings
        self._track(self.hooks.log_rollout(report, tracked) if report.samples else tracked, report.step)

    def record_evaluation(
        self,
        state: TrainState,
        version: str,
        metrics: Metrics,
        seconds: float,
        samples: Mapping[str, Sequence[Sample]],
    ) -> None:
        """Record one evaluation, with the samples of every dataset."""
        metrics["eval/step"] = float(state.rollout_id)
        progress = {"step": state.step, "rollout_id": state.rollout_id, "weight_version": version}
        self.append("metrics.jsonl", {**progress, "metrics": metrics})
        self.append("perf.jsonl", {"step": state.step, "metrics": {"perf/eval_time": seconds}})
        self.evaluations.append((state.rollout_id, metrics))
        tracked = self.hooks.log_eval(state.rollout_id, samples, metrics)
        self._track(tracked, state.step)
        for name, dataset_samples in samples.items() if tracked else ():
            self._log_table(name, dataset_samples, state)

    def _track(self, metrics: Metrics, step: int) -> None:
        for tracker in self.trackers:
            tracker.log(metrics, step=step)

    def _log_table(self, name: str, samples: Sequence[Sample], state: TrainState) -> None:
        """Log a table with a few answers of an evaluation to the trackers."""
        key = resolve_dataset_settings(self.settings, name).score.reward_key
        rows = table_of(samples, self.settings.track.eval_table_rows, reward_key=key)
        step = state.step if self.settings.track.always_use_train_step else state.rollout_id
        for tracker in self.trackers if rows else ():
            tracker.table(f"eval/{name}/samples", rows, step=step)

    def keep_samples(self, path: Path, samples: Sequence[Sample]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_samples(path, samples)

    def save(self, policy: Policy, state: TrainState, samples: Sequence[Sample]) -> None:
        """Write a checkpoint under the round's number, atomically."""
        started = time.perf_counter()
        saved_state = {
            "step": state.step,
            "rollout_id": state.rollout_id,
            "weight_version": policy.weight_version,
            "pending": [[execution, asdict(row)] for execution, row in state.pending],
            "sampling": sampler_state_to_json(self.sampling),
            "sizes": self.folder.sizes(),
            "scores": self.scores,
            "evaluations": self.evaluations,
        }

        def fill(staged: Path) -> None:
            (staged / "policy").mkdir()
            policy.save(staged / "policy")
            if self.critic is not None:
                (staged / "critic").mkdir()
                self.critic.save(staged / "critic")
            if self.settings.run.keep_samples and samples:
                self.keep_samples(staged / "samples.jsonl", samples)
            write_text(staged / "state.json", json.dumps(saved_state) + "\n")

        self.folder.save(state.rollout_id, fill)
        self.folder.prune(self.settings.run.keep_checkpoints)
        timings = {"perf/save_model_time": time.perf_counter() - started}
        self.append("perf.jsonl", {"step": state.step, "metrics": timings})
        self._track(timings, state.step)

    def restore(self, policy: Policy, warn: Callable[[str], None]) -> TrainState:
        """Restore the newest complete checkpoint; without one, the end of the warm-up or the start."""
        self.sampling, self.scores, self.evaluations = SamplerState(), [], []
        if not self.folder.checkpoints():
            warmup = self.folder.path / "warmup"
            if damage := self.folder.lost_metrics(warmup):
                raise CheckpointError(
                    f"{warmup}: {damage}; put it back from a copy, or start the run anew with --force"
                )
            state = warmup / "state.json"
            self.folder.cut_back(json.loads(state.read_text())["sizes"] if state.exists() else {})
            return TrainState()
        folder = self.folder.newest(warn)
        self.folder.point_latest(folder)
        saved_state = json.loads((folder / "state.json").read_text())
        if missing := [
            key for key in ("pending", "sampling", "sizes", "scores", "evaluations") if key not in saved_state
        ]:
            raise CheckpointError(
                f"{folder}/state.json: no {missing[0]!r}: another version of slimectl wrote it, and this one cannot go "
                f"on from there; begin a new run from its weights: --model {folder}"
            )
        policy.load(folder / "policy")
        if self.critic is not None:
            self.critic.load(folder / "critic")
        self.folder.cut_back(saved_state["sizes"])
        self.sampling = sampler_state_from_json(saved_state["sampling"])
        self.scores = [(number, score) for number, score in saved_state["scores"]]
        self.evaluations = [(number, metrics) for number, metrics in saved_state["evaluations"]]
        return load_state(folder, policy)


def load_state(folder: Path, policy: Policy) -> TrainState:
    """Return the training state of the checkpoint in `folder`, which `policy` has loaded.

    A checkpoint outside a run (`slimectl train --save`) has no such state: training continues at the policy's step.
    """
    file = folder / "state.json"
    if not file.exists():
        return TrainState(step=int(policy.weight_version))
    saved_state = json.loads(file.read_text())
    # Checkpoints up to 0.1.0 name the loss weights of a row "weights".
    rows = [
        (execution, {"loss_weights" if name == "weights" else name: values for name, values in row.items()})
        for execution, row in saved_state["pending"]
    ]
    pending = [(execution, TrainingSample(**row)) for execution, row in rows]
    return TrainState(step=saved_state["step"], rollout_id=saved_state["rollout_id"], pending=pending)
