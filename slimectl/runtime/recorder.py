"""Records a run (metrics, samples, evaluations, checkpoints) and restores it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from slimectl.algorithms.normalization import RewardMoments
from slimectl.data.atomic_replace import storage_errors, write_text
from slimectl.data.jsonl import write_samples
from slimectl.data.metrics_catalogue import progress
from slimectl.data.model_card import TrainingProgress, write_cards
from slimectl.data.records import sampler_state_from_json, sampler_state_to_json
from slimectl.data.run_dir import RunDir
from slimectl.data.source_identity import Identity
from slimectl.diagnosis import Diagnosis, Finding
from slimectl.diagnosis.diagnosis import replayed
from slimectl.errors import CheckpointError, SettingsError
from slimectl.protocols import Critic, Policy, Tracker
from slimectl.runtime import builders
from slimectl.runtime.background_save import BackgroundSave, start_models
from slimectl.runtime.capacity import machine_perf
from slimectl.settings import Settings
from slimectl.settings.keys import flat
from slimectl.stages.best import Evaluations
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.stages.metrics import round_perf
from slimectl.stages.request_times import slowest
from slimectl.stages.round_timer import RoundTimer
from slimectl.stages.signal import SignalCount
from slimectl.stages.train import TrainState
from slimectl.system.model_files import TRAINER_STATE
from slimectl.system.stdio import logger
from slimectl.system.timeline import Span, take_spans, timeline
from slimectl.types import Metrics, Sample, SamplerState, StepReport, TrainingSample

PASSES = ("forward_backward", "log_probs", "top_log_probs", "values")
"""Calls of a policy in which all ranks compute, by which the slowest rank is found."""

DIAGNOSED = ("metrics.jsonl", "perf.jsonl")
"""Files whose lines the diagnosis reads."""
LOGGED_BY_ROUNDS = {"rollout/reward_timeouts", "rollout/no_reward"}
"""Metrics of troubles that every round logs with its samples, so that their findings are not logged again."""
LEVELS = {"error": logging.WARNING, "warning": logging.WARNING, "advice": logging.INFO}
"""Level of the message about a finding that begins."""


class RunRecorder:
    """Recorder of one run.

    metrics.jsonl has only deterministic values, so that a resumed run writes the same bytes as an uninterrupted one.
    Timings go to perf.jsonl.
    """

    def __init__(self, folder: RunDir, settings: Settings, hooks: Hooks = NO_HOOKS) -> None:
        self.folder = folder
        self.settings = settings
        self.hooks = hooks
        self.trackers: Sequence[Tracker] = ()
        self.sampling = SamplerState()
        """Sampling state after the last round."""
        self.data: dict[str, list[Identity]] = {}
        """Identities of the data sources, which a checkpoint records."""
        self.critic: Critic | None = None
        """Separate critic, which is saved and restored with the policy."""
        self.scores: list[tuple[int, float]] = []
        """(round, mean reward) for the curve. Demonstrations and preferences have the loss instead."""
        self.evaluations: list[tuple[int, Metrics]] = []
        """(round, metrics) of every evaluation, oldest first."""
        self.diagnosis: Diagnosis | None = None
        """Findings about the records, from `rewind` on."""
        self.errors: list[Finding] = []
        """Findings of severity error that have begun since then."""
        self._last_save: tuple[int, Metrics] | None = None
        """Step of the checkpoint that the run was resumed from, and the time it took to write."""
        self._cut_lines: frozenset[str] = frozenset()
        """Lines of metrics.jsonl after the checkpoint that the run was resumed from."""
        self._round: Sequence[Sample] = ()
        """Samples of the round whose steps are being recorded."""
        self._train_data: list[dict[str, Any]] = []
        """Records of the rows that these steps trained on."""
        self._checkpoint: Path | None = None
        """Checkpoint that the run continues from."""
        self._background_save: BackgroundSave | None = None
        """Checkpoint that is written while training continues."""

    def append(self, name: str, line: dict[str, Any]) -> bool:
        """Append a line to a file. Return whether the run already wrote the same line before it was resumed."""
        path, text = self.folder.path / name, json.dumps(line) + "\n"
        with storage_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(text)
        if self.diagnosis is not None and name in DIAGNOSED:
            for finding in self.diagnosis.observe(line):
                if finding.lasts:
                    self.errors += [finding] if finding.severity == "error" else []
                    if LOGGED_BY_ROUNDS.isdisjoint(evidence.metric for evidence in finding.evidence):
                        logger.log(LEVELS[finding.severity], finding.message(self.folder.path))
        return text in self._cut_lines

    def record_spans(self, number: int, policy: object = None) -> Metrics:
        """Append the new spans of the run's processes to the timeline. Spans without a round get this number.

        A policy on several ranks has spans of each. Return how much more its slowest rank computes than the others.
        """
        on_ranks = getattr(policy, "on_ranks", None) if timeline.enabled else None
        by_rank: list[list[Span]] = [] if on_ranks is None else on_ranks(take_spans)
        spans = [*timeline.take(), *chain.from_iterable(by_rank)]
        if spans:
            path = self.folder.path / "timeline.jsonl"
            with storage_errors(path), path.open("ab") as file:
                file.writelines(orjson.dumps({"round": number} | span) + b"\n" for span in spans)
        busy = {
            rank: sum(s.get("busy", 0.0) for s in spans if s["name"] in PASSES) for rank, spans in enumerate(by_rank)
        }
        return slowest("rank", busy)

    def record(self, report: StepReport) -> None:
        """Record one optimizer step, or a round without one."""
        self._round = report.samples or self._round
        self._train_data = [*([] if report.samples else self._train_data), *report.train_data]
        report.timings |= round_perf(self._round, report.timings, gpus=self._rollout_gpus(report.timings))
        if report.last_step_of_round:
            report.timings |= machine_perf(self.folder.path)
        again = self.append("metrics.jsonl", report.to_json())
        self.append("perf.jsonl", {"step": report.step, "metrics": report.timings})
        if (point := progress(report.metrics)) is not None:
            self.scores.append((report.rollout_id, point[1]))
        tracked = report.metrics | report.timings
        tracked = self.hooks.log_rollout(report, tracked) if report.samples else tracked
        self._track(tracked, report.step, again=again)
        if report.samples and "rollout/raw_reward" in tracked:
            step = report.step if self.settings.track.always_use_train_step else report.rollout_id
            builders.log_rewards(self._trackers_of(again), report.rewards, step=step)

    def _rollout_gpus(self, timings: Metrics) -> int:
        """Return the GPUs of the engines, which may have joined or left."""
        settings = self.settings
        first = len(settings.engine.url) or settings.num_engines
        joined = int(timings.get("perf/engines", first)) - first
        return max(1, settings.rollout_gpus + joined * settings.cluster.rollout_num_gpus_per_engine)

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
        again = self.append("metrics.jsonl", {**progress, "metrics": metrics})
        self.append("perf.jsonl", {"step": state.step, "metrics": {"perf/eval_time": seconds}})
        self.evaluations.append((state.rollout_id, metrics))
        if self.compared and self.compared.metric not in metrics:
            raise SettingsError(
                f"run.save_best: the evaluation has no {self.compared.metric}, only {', '.join(sorted(metrics))}. Set "
                f"one of these."
            )
        tracked = self.hooks.log_eval(state.rollout_id, samples, metrics)
        self._track(tracked, state.step, again=again)
        for name, dataset_samples in samples.items() if tracked else ():
            self._log_table(name, dataset_samples, state, again=again)

    def _track(self, metrics: Metrics, step: int, *, again: bool = False) -> None:
        for tracker in self._trackers_of(again):
            tracker.log(metrics, step=step)

    def _trackers_of(self, again: bool) -> list[Tracker]:
        """Return the trackers that need a line. Services already have one that was written before a resume."""
        return [tracker for tracker in self.trackers if not (again and getattr(tracker, "keeps_lines", False))]

    def _log_table(self, name: str, samples: Sequence[Sample], state: TrainState, *, again: bool) -> None:
        """Log a table with a few responses of an evaluation to the trackers."""
        step = state.step if self.settings.track.always_use_train_step else state.rollout_id
        trackers = self._trackers_of(again)
        table = builders.sample_table(trackers, self.settings, name, samples)
        builders.log_samples(trackers, self.settings, name, table, step=step)

    def keep_samples(self, path: Path, samples: Sequence[Sample | Mapping[str, Any]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_samples(path, samples)

    def keep_round(self, folder: Path, samples: Sequence[Sample]) -> None:
        """Write the samples of a round, and the rows of its steps, according to run.keep_samples."""
        if self.settings.run.keep_samples and samples:
            self.keep_samples(folder / "samples.jsonl", samples)
        if self._train_data:
            self.keep_samples(folder / "train_data.jsonl", self._train_data)

    def save(self, policy: Policy, state: TrainState, samples: Sequence[Sample]) -> None:
        """Write a checkpoint under the round's number, atomically. With run.async_save it appears there later.

        Waits for the previous one.
        """
        saved_state = {
            "step": state.step,
            "rollout_id": state.rollout_id,
            "weight_version": policy.weight_version,
            "pending": [[execution, asdict(row)] for execution, row in state.pending],
            "signal": asdict(state.signal),
            "moments": asdict(state.moments),
            "sampling": sampler_state_to_json(self.sampling),
            "sizes": self.folder.sizes(),
            "data": self.data,
            "scores": self.scores,
            "evaluations": self.evaluations,
        }
        text = json.dumps(saved_state) + "\n"
        models: dict[str, Any] = {"policy": policy} | ({} if self.critic is None else {"critic": self.critic})
        number, is_best = state.rollout_id, self.is_best(state.rollout_id)
        done = TrainingProgress(number, state.step, tuple(self.scores), tuple(self.evaluations))

        @timeline.block("checkpoints", "save", round=number)
        def write(copied: Callable[[], None] | None = None) -> None:
            def fill(staged: Path) -> None:
                folders = [staged / name for name in models]
                if copied is None:
                    for model, folder in zip(models.values(), folders, strict=True):
                        folder.mkdir()
                        model.save(folder)
                else:
                    wait = start_models(list(models.values()), folders)
                self.keep_round(staged, samples)
                write_text(staged / "state.json", text)
                if copied is not None:
                    copied()
                    wait()
                for folder in folders:
                    separate_trainer_state(folder)
                write_cards(folders[0], self.settings, done)

            self.folder.save(number, fill)
            if is_best:
                self.folder.point_best(self.folder.step(number))
            self.folder.prune(self.settings.run.keep_checkpoints)

        for tracker in self.trackers:
            builders.flush(tracker)
        timer = RoundTimer(log_memory=self.settings.track.log_memory)
        with timer.time("perf/save_model_time", of=policy):
            self.finish_save()
            if self.settings.run.async_save:
                self._background_save = BackgroundSave(number, write)
            else:
                write()
        timings = {
            name: value for name, value in timer.take(number).items() if name.startswith(("perf/save", "memory/"))
        }
        self.append("perf.jsonl", {"step": state.step, "metrics": timings})
        self._track(timings, state.step)

    def check_save(self) -> None:
        """Raise the error of a checkpoint that could not be written in the background."""
        if self._background_save is not None:
            self._background_save.check()

    def finish_save(self) -> None:
        """Wait until the checkpoint in the background is complete. Raises its error, once."""
        save, self._background_save = self._background_save, None
        if save is not None:
            save.wait()

    def abandon_save(self) -> None:
        """Wait for the checkpoint in the background, before its models are closed. Its error does not matter now."""
        with suppress(Exception):
            self.finish_save()

    def checkpoints(self) -> list[int]:
        """Return the rounds of all checkpoints, oldest first, including one that is being written."""
        rounds = self.folder.checkpoints()
        number = self._background_save.number if self._background_save is not None else None
        return rounds if number is None or number in rounds else [*rounds, number]

    @property
    def compared(self) -> Evaluations | None:
        """Evaluations compared by the metric of run.save_best, if it is set."""
        metric = self.settings.run.save_best
        return Evaluations(metric, self.evaluations) if metric else None

    def is_best(self, number: int) -> bool:
        """Return whether a round has the best evaluation so far."""
        best = self.compared.best if self.compared else None
        return best is not None and best[0] == number

    def _lines_after(self, sizes: Mapping[str, int]) -> frozenset[str]:
        """Return the lines of metrics.jsonl that a resume removes but tracking services already have."""
        with suppress(OSError, UnicodeDecodeError), (self.folder.path / "metrics.jsonl").open("rb") as file:
            file.seek(sizes.get("metrics.jsonl", 0))
            return self._cut_lines | frozenset(file.read().decode().splitlines(keepends=True))
        return self._cut_lines

    def _find_save(self, saved_state: Mapping[str, Any]) -> tuple[int, Metrics] | None:
        """Find the time it took to write a checkpoint, because a resume removes that line of perf.jsonl."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            with (self.folder.path / "perf.jsonl").open("rb") as file:
                file.seek(saved_state["sizes"]["perf.jsonl"])
                line = json.loads(file.readline())
            if line["step"] == saved_state["step"] and "perf/save_model_time" in line["metrics"]:
                return line["step"], line["metrics"]
        return None

    def record_warmup(self, step: int, metrics: Metrics) -> None:
        """Record one step of the supervised warm-up."""
        again = self.append("metrics.jsonl", {"step": step, "metrics": metrics})
        self._track(metrics, step, again=again)

    def track_last_save(self) -> None:
        """Log again the save time of the checkpoint that the run was resumed from, as an uninterrupted run would."""
        if self._last_save is not None:
            step, timings = self._last_save
            for tracker in self.trackers:
                if getattr(tracker, "cut_back", False) or getattr(tracker, "skips_held", False):  # others still have it
                    tracker.log(timings, step=step)

    def rewind(self, warn: Callable[[str], None]) -> TrainState:
        """Go back to the newest complete checkpoint, or without one to the end of the warm-up or the start.

        Later records are removed. `load` reads the weights.
        """
        self.diagnosis, self.errors = None, []
        state = self._rewind(warn)
        self.diagnosis = replayed(dict(flat(self.settings)), self.folder.path)
        return state

    def _rewind(self, warn: Callable[[str], None]) -> TrainState:
        self.sampling, self.scores, self.evaluations = SamplerState(), [], []
        self._checkpoint, self._last_save = None, None
        if not self.folder.checkpoints():
            warmup = self.folder.path / "warmup"
            if damage := self.folder.lost_metrics(warmup):
                raise CheckpointError(f"{warmup}: {damage}. Restore it from a copy, or restart the run with --force.")
            state = warmup / "state.json"
            sizes = json.loads(state.read_text())["sizes"] if state.exists() else {}
            self._cut_lines = self._lines_after(sizes)
            self.folder.cut_back(sizes)
            return TrainState()
        folder = self.folder.newest(warn)
        self.folder.point_latest(folder)
        saved_state = json.loads((folder / "state.json").read_text())
        if missing := [
            key for key in ("pending", "sampling", "sizes", "scores", "evaluations") if key not in saved_state
        ]:
            raise CheckpointError(
                f"{folder}/state.json: no {missing[0]!r}: this version of slimectl cannot resume a run of "
                f"another version. Start a new run from its weights: --model {folder}"
            )
        self._checkpoint = folder
        self._last_save, self._cut_lines = self._find_save(saved_state), self._lines_after(saved_state["sizes"])
        self.folder.cut_back(saved_state["sizes"])
        if self._last_save is not None:
            self.append("perf.jsonl", {"step": self._last_save[0], "metrics": self._last_save[1]})
        self.sampling = sampler_state_from_json(saved_state["sampling"])
        self.scores = [(number, score) for number, score in saved_state["scores"]]
        self.evaluations = [(number, metrics) for number, metrics in saved_state["evaluations"]]
        return _state_of(saved_state)

    @property
    def resumed(self) -> bool:
        """Whether the run had records before `rewind`."""
        return self._checkpoint is not None or bool(self._cut_lines)

    def load(self, policy: Policy, *, total_steps: int | None = None) -> None:
        """Load the checkpoint that `rewind` went back to, if there is one, into the policy and the critic.

        `total_steps` is the length of the run, where a schedule ends.
        """
        if self._checkpoint is None:
            return
        policy.load(self._checkpoint / "policy")
        builders.warn_of_changed_schedule(self.settings.train, self._checkpoint / "policy", total_steps)
        if self.critic is not None:
            self.critic.load(self._checkpoint / "critic")


def separate_trainer_state(folder: Path) -> None:
    """Move the trainer's state of a saved model into a separate folder next to it."""
    if (state := folder / TRAINER_STATE).exists():
        (folder.parent / TRAINER_STATE).mkdir(exist_ok=True)
        state.rename(folder.parent / TRAINER_STATE / folder.name)


def load_state(folder: Path, policy: Policy) -> TrainState:
    """Return the training state of the checkpoint in `folder`, which `policy` has loaded.

    A checkpoint outside a run (`slimectl train --save`) has no such state: training continues at the policy's step.
    """
    file = folder / "state.json"
    if not file.exists():
        return TrainState(step=int(policy.weight_version))
    return _state_of(json.loads(file.read_text()))


def _state_of(saved_state: Mapping[str, Any]) -> TrainState:
    # Checkpoints up to 0.1.0 call a row's loss weights "weights".
    rows = [
        (execution, {"loss_weights" if name == "weights" else name: values for name, values in row.items()})
        for execution, row in saved_state["pending"]
    ]
    pending = [(execution, TrainingSample(**row)) for execution, row in rows]
    signal = SignalCount(**saved_state.get("signal", {}))  # missing in checkpoints of older versions
    moments = RewardMoments(**saved_state.get("moments", {}))
    return TrainState(saved_state["step"], saved_state["rollout_id"], pending, signal, moments)
