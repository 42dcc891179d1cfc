"""Runs a training run in its folder: from settings to the result, with restarts and resumption."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from slimectl.data.locks import Lock
from slimectl.data.manifest import Manifest
from slimectl.data.ownership import read_manifest
from slimectl.data.run_dir import RunDir
from slimectl.data.run_settings import changed_settings
from slimectl.data.source_identity import check_data
from slimectl.errors import DiedError, DivergedError, OutOfMemoryError
from slimectl.hooks import check_hooks
from slimectl.hooks.user_hooks import UserHooks
from slimectl.protocols import NO_PROGRESS, ProcessLister, Progress, StreamAbandoner
from slimectl.runtime import builders
from slimectl.runtime.evaluator import Evaluator
from slimectl.runtime.grace import GracePeriod, RoundAbandoned
from slimectl.runtime.machine import environment
from slimectl.runtime.memory_fit import MemoryFit, fit_packs
from slimectl.runtime.recorder import RunRecorder
from slimectl.runtime.report_loop import ReportLoop, Reports, abandonment
from slimectl.runtime.rounds import RecordedRounds, SampledRounds
from slimectl.runtime.run_parts import RunContext, RunParts, build_parts
from slimectl.runtime.stall_watch import StallWatch
from slimectl.settings import Settings
from slimectl.settings.keys import settings_toml
from slimectl.stages.advantages import Models
from slimectl.stages.evaluate import resolve_dataset_settings
from slimectl.stages.run import run as run_stage
from slimectl.stages.train import TrainState
from slimectl.system.shared_memory import remove_orphans
from slimectl.system.stdio import log_to_file, logger, quantity
from slimectl.system.timeline import timeline

OF_DEVICES = re.compile("cuda|nccl|cublas|cudnn|nvidia|flashinfer|sgl_kernel", re.IGNORECASE)
"""Words in errors that `slimectl doctor` may explain."""


class TrainingRun:
    """A training run in its folder. `interrupted` is called after every round. If true, the run saves and ends.

    When `grace` is over, the round is abandoned, and the state after the previous round is saved. Without `rounds`, the
    policy samples its own. The manifest records the `recipe` of the settings. `progress` counts rounds.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        grace: GracePeriod | None = None,
        rounds: SampledRounds | RecordedRounds | None = None,
        recipe: str | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        self._recipe = recipe
        self.progress = progress
        settings = builders.with_template_date(settings)
        self.rounds = rounds or SampledRounds(settings)
        self.rounds.settings = settings
        self.rounds.check()
        self.settings = settings
        self.interrupted = interrupted
        self.grace = grace or GracePeriod()
        self.folder = RunDir(Path(settings.run.dir) / (settings.run.name or "run"))
        self.hooks = UserHooks(settings)
        self.recorder = RunRecorder(self.folder, settings, self.hooks)
        self.memory = MemoryFit(settings, self.folder.path)
        self.executor: Any = None
        self.state = TrainState()
        self._watch = StallWatch(
            settings, self.folder.path, self._resume_command, self.grace, may_exit=grace is not None
        )
        check_hooks(settings)  # hooks are loaded before the run's folder is created
        for name in settings.eval.data:
            check_hooks(resolve_dataset_settings(settings, name), "rollout.", "score.")
        builders.reward(settings)
        builders.agent(settings)

    def execute(
        self,
        *,
        resume: bool = False,
        force: bool = False,
        lock: Lock | None = None,
        on_start: Callable[[], None] = lambda: None,
    ) -> bool:
        """Run to the end. Return False if interrupted. See `reports`."""
        reports = self.reports(resume=resume, force=force, lock=lock, on_start=on_start)
        while True:
            try:
                next(reports)
            except StopIteration as end:
                finished: bool = end.value
                return finished

    def reports(
        self,
        *,
        resume: bool = False,
        force: bool = False,
        lock: Lock | None = None,
        on_start: Callable[[], None] = lambda: None,
    ) -> Reports:
        """Yield the report of every step once it is recorded. Returns False if interrupted.

        `lock` is the folder's lock, if the caller holds it. `on_start` is called once the folder belongs to the run. If
        a training rank dies, steps after the last checkpoint are reported again.

        Raises SettingsError if the folder holds a run, if a run is active there, or if it is not a run's folder.
        """
        with self._watch, closing(self._reports(resume, force, lock, on_start)) as reports:
            try:
                while True:
                    report = next(reports)
                    with self._watch.paused():
                        yield report
            except StopIteration as end:
                finished: bool = end.value
            except (Exception, KeyboardInterrupt) as error:
                if self._watch.error is None:
                    raise
                raise self._watch.error from error
        if self._watch.error is not None:
            raise self._watch.error
        return finished

    def _reports(self, resume: bool, force: bool, lock: Lock | None, on_start: Callable[[], None]) -> Reports:
        self.rounds.check_inputs()
        if not resume:
            self.folder.check_start()
        self.recorder.data = builders.data_identities(self.settings.eval, self.rounds.paths)
        files = [
            entry for names in self.recorder.data.values() for source in names for entry in source.get("files", ())
        ]
        inputs = {path: digest for path, _, digest in files}
        manifest = Manifest("run", self.settings.model_dump(by_alias=True), inputs)
        manifest.facts |= {"folder": str(Path.cwd()), "environment": environment(), **self.rounds.facts}
        recipe = (read_manifest(self.folder.path) or {}).get("recipe") if resume else self._recipe
        manifest.facts |= {"recipe": recipe} if recipe else {}
        with ExitStack() as ending:
            if not self.folder.path.exists():
                ending.push(self._discard_after_error)
            ending.enter_context(lock or self.folder.lock(warn=logger.warning))
            if resume:
                self.folder.check_command(self.rounds.command)
                check_data(self.folder, self.settings, self.recorder.data)
                self.folder.adopt(manifest.facts)
            else:
                self.folder.start(
                    settings_toml(self.settings), force=force, manifest=manifest.facts, warn=logger.warning
                )
            ending.enter_context(log_to_file(self.folder.path / "log.txt"))
            on_start()
            self._watch.start()
            if resume and (changes := [*changed_settings(self.settings, self.folder.path)]):
                logger.info(f"resuming with changed settings: {', '.join(changes)}")
                reports = self._keeping(changes)
            else:
                reports = self._run_with_advice()
            remove_orphans()
            finished = yield from reports
            if finished:
                manifest.write(self.folder.path, counts={"rounds": self.state.rollout_id, "steps": self.state.step})
            return finished

    def _keeping(self, changes: Sequence[str]) -> Reports:
        """Run. Write the settings of a resume to run.toml once a step has succeeded, or if no step is left."""
        first, reports = self.folder.next_round, self._run_with_advice()
        report, finished = None, False
        try:
            report = next(reports)
        except StopIteration as end:
            finished = bool(end.value)
        if report is not None or finished:
            self.folder.change_settings(settings_toml(self.settings), changes, first=first)
        if report is None:
            return finished
        yield report
        return (yield from reports)

    def _discard_after_error(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the new folder of a run that failed before its first output. An interrupted run can be resumed."""
        if kind is not None and issubclass(kind, Exception):
            self.folder.discard()

    def _run_with_advice(self) -> Reports:
        """Run. If it ends with an error, report the command to continue, or to check the machine."""
        try:
            return (yield from self._run_on_executor())
        except RoundAbandoned:
            logger.warning(abandonment(f"round {self.state.rollout_id + 1}", self.folder, self._resume_command))
            return False
        except DivergedError as error:
            rounds = self.folder.checkpoints()
            advice = f"the last checkpoint is {self.folder.step(rounds[-1])}" if rounds else "no checkpoint was saved"
            command = f"{self._resume_command} -s train.lr=LOWER"
            raise DivergedError(f"{error}; {advice}. Continue with: {command}") from error
        except OutOfMemoryError as error:
            raise OutOfMemoryError(f"{error}. Continue with: {self._resume_command} -s KEY=VALUE") from error
        except Exception as error:
            if OF_DEVICES.search(str(error)):
                settings = f" {shlex.quote(self._recipe)}" if self._recipe else ""
                logger.warning(f"Check this machine: slimectl doctor{settings}")
            raise

    def _run_on_executor(self) -> Reports:
        """Run on the processes or machines of a new executor."""
        executor = builders.executor(self.settings, logs=self.folder.path / "logs")
        if isinstance(executor, StreamAbandoner):
            self.grace.when_over(executor.abandon_streams)
        self._watch.processes = executor if isinstance(executor, ProcessLister) else None
        with closing(executor):
            self.executor = builders.tracked_executor(executor, self.settings, self.folder.path)
            return (yield from self._run_with_restarts())

    def _run_with_restarts(self) -> Reports:
        """Run. Restart from the last checkpoint if a trainer or engine has died, at most run.max_restarts times.

        Also restart, with other settings, when trainers ran out of memory. That does not count: it cannot happen often.
        """
        restarts_left = self.settings.run.max_restarts
        self.memory.read()
        while True:
            try:
                with ExitStack() as ending:
                    return (yield from self._run_from_checkpoint(ending))
            except OutOfMemoryError as error:
                if not error.settings:
                    raise
                self.memory.adopt(error.settings)
                logger.warning(f"{error}. The run does so, and continues from the last checkpoint")
            except DiedError as error:
                if not restarts_left:
                    raise
                logger.warning(
                    f"{error}. Continuing from the last checkpoint ({quantity(restarts_left, 'restart')} left)"
                )
                restarts_left -= 1

    def _run_from_checkpoint(self, ending: ExitStack) -> Reports:
        """Run from the newest checkpoint, or from the start. `ending` closes everything that is built.

        Trackers start first, so that errors in them are found before any work.
        """
        settings, total = self.memory.settings, self.settings.run.num_rollout
        self.rounds.settings = self.recorder.settings = settings
        self.state = self.recorder.rewind(logger.warning)
        if self.state.rollout_id:
            logger.info(f"resuming {self.folder.path} after round {self.state.rollout_id}")
        if total is not None and self.state.rollout_id >= total and self._is_evaluated:
            self.folder.prune(settings.run.keep_checkpoints)  # the run may have been killed before it pruned
            logger.info(f"All {total} rounds are done. To continue, raise the number: -s run.num_rollout=N")
            return True
        self._start_trackers(ending)
        self._expect_rounds()
        timeline.start(enabled=settings.track.timeline)
        ending.callback(self._end_timeline)
        started = time.perf_counter()
        with self.progress.phase("loading"):
            run = RunContext(self.rounds, self.recorder, self.state, self.interrupted, self.grace, self.progress)
            parts = build_parts(run, ending, self.executor)
            ending.callback(self.recorder.abandon_save)
            settings = self._fit_packs(parts)
        timeline.take()  # a warm-up has no rounds
        timeline.record("trainer", "load", started, round=self.state.rollout_id + 1)
        self._watch.is_starting = False
        evaluator = Evaluator(parts)
        evaluator.before_rounds()
        self._expect_rounds()
        loop = ReportLoop(parts, evaluator, self._resume_command)
        models = parts.models
        timer = builders.round_timer(settings, parts.model, models.policy, progress=self.progress)
        reports = run_stage(
            self.rounds.stream(parts.service, models, self.recorder.sampling, self.executor),
            Models(models.policy, models.critic, models.frozen, timer, render=models.render),
            parts.sync if self.rounds.samples else None,
            settings,
            state=self.state,
            hooks=self.hooks,
            waiting=loop.waiting,
        )
        ending.callback(reports.close)  # type: ignore[attr-defined] # a generator
        finished = yield from loop.consume(reports)
        self.grace.finish()
        return finished

    def _end_timeline(self) -> None:
        """Record what happened since the last round, unless the run ended before its first one."""
        if self.state.rollout_id:
            self.recorder.record_spans(self.state.rollout_id)
        timeline.start(enabled=False)

    def _fit_packs(self, parts: RunParts) -> Settings:
        """Find the size of packs, if it is open, while no engine uses the trainer's GPUs. Return the settings."""
        if self.memory.is_open:
            tokens = fit_packs(parts.models, self.memory.settings)
            if tokens is None:
                tokens = self.memory.settings.train.pack_tokens
                logger.info(f'train.max_tokens_per_gpu = "auto": packs of {tokens} tokens, by the planner\'s estimate')
            self.memory.adopt({"train.max_tokens_per_gpu": tokens})
            self.rounds.settings = self.recorder.settings = self.memory.settings
        return self.memory.settings

    @property
    def _is_evaluated(self) -> bool:
        """Whether the checkpoint has the evaluation of its round. A signal may have interrupted it."""
        rounds = {number for number, _ in self.recorder.evaluations}
        return not self.settings.eval.data or self.state.rollout_id in rounds

    def _expect_rounds(self) -> None:
        """Start measuring progress. The time before the first round would distort the estimate."""
        self.progress.expect(self.rounds.count(), done=self.state.rollout_id)

    def _start_trackers(self, ending: ExitStack) -> None:
        self.recorder.trackers = builders.start_trackers(
            self.settings,
            self.folder.path,
            resumed=self.recorder.resumed,
            resumed_at=self.state.step if self.state.rollout_id else None,
            rounds=self.rounds.count(),
            done=self.state.rollout_id,
            progress=self.progress,
        )
        for tracker in self.recorder.trackers:
            ending.callback(tracker.close)
        self.recorder.track_last_save()

    @property
    def _resume_command(self) -> str:
        return f"slimectl {self.rounds.command} --resume {shlex.quote(str(self.folder.path))}"
