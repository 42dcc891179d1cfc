"""Runs a training run from settings to result: loop, evaluate, save, resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl import builders
from slimectl.data.locks import Lock
from slimectl.data.manifest import Manifest
from slimectl.data.ownership import read_manifest
from slimectl.data.run_dir import RunDir
from slimectl.errors import DiedError, DivergedError, SettingsError, SlimectlError
from slimectl.hooks import check_hooks
from slimectl.hooks.user_hooks import UserHooks
from slimectl.protocols import NO_PROGRESS, Progress
from slimectl.runtime.grace import GracePeriod, RoundAbandoned
from slimectl.runtime.initial_model import SftWarmup, prepare_model
from slimectl.runtime.profiling import RoundProfiler
from slimectl.runtime.recorder import RunRecorder
from slimectl.runtime.rollout_worker import RolloutService
from slimectl.runtime.round_checks import check_log_prob_mismatch, lasting_lack_of_signal
from slimectl.runtime.rounds import RecordedRounds, SampledRounds
from slimectl.settings import Settings
from slimectl.stages.evaluate import resolve_dataset_settings
from slimectl.stages.run import run
from slimectl.stages.train import TrainState
from slimectl.stdio import log_to_file, logger
from slimectl.types import Metrics, Sample, StepReport

if TYPE_CHECKING:
    from slimectl.weight_sync.base import WeightSynchronizer

Reports = Generator[StepReport, None, bool]
"""The reports of a run, and whether it reached its end."""


@dataclass(frozen=True)
class RunParts:
    """Models of a run, its engines and their weights; a training from samples has engines only for evaluations."""

    model: Path
    models: builders.TrainableModels
    side: RolloutService | None
    sync: WeightSynchronizer | None
    moving: builders.PeriodicReference


class TrainingRun:
    """A training run in its folder. `interrupted` is called after every round: true saves and ends the run.

    When `grace` is over the round is abandoned, and the state after the round before is saved. The policy samples its
    own rounds where no `rounds` are given. The manifest names the `recipe` of the settings. `progress` counts rounds.
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
        self.rounds = rounds or SampledRounds(settings)
        self.rounds.check()
        self.settings = settings
        self.interrupted = interrupted
        self.grace = grace or GracePeriod()
        self._between_rounds = True
        """Whether policy and state are those after a whole round."""
        self._saved: tuple[int, int] | None = None
        self._evaluated: tuple[int, int] | None = None
        """Round and step of the newest checkpoint and evaluation."""
        self.folder = RunDir(Path(settings.run.dir) / (settings.run.name or "run"))
        self.hooks = UserHooks(settings)
        self.journal = RunRecorder(self.folder, settings, self.hooks)
        self.executor: Any = None
        self.state = TrainState()
        self.profiler = RoundProfiler(None, self.folder.path)
        check_hooks(settings)  # hooks are loaded before the run's folder is created
        for name in settings.eval.data:
            check_hooks(resolve_dataset_settings(settings, name), "rollout.", "score.")
        builders.reward(settings)
        builders.agent(settings)

    def execute(
        self,
        settings_toml: str,
        *,
        resume: bool = False,
        force: bool = False,
        lock: Lock | None = None,
        on_start: Callable[[], None] = lambda: None,
    ) -> bool:
        """Run to the end; return False if interrupted. See `reports`."""
        reports = self.reports(settings_toml, resume=resume, force=force, lock=lock, on_start=on_start)
        while True:
            try:
                next(reports)
            except StopIteration as end:
                finished: bool = end.value
                return finished

    def reports(
        self,
        settings_toml: str,
        *,
        resume: bool = False,
        force: bool = False,
        lock: Lock | None = None,
        on_start: Callable[[], None] = lambda: None,
    ) -> Reports:
        """Yield the report of every step once it is recorded; the value at the end is False if interrupted.

        `lock` is the folder's lock, if the caller holds it; `on_start` is called once the folder is the run's. Steps
        after the last checkpoint are reported again if a trainer's rank died.

        Raises SettingsError if the folder holds a run, if a run is active there, or if it is not a run's folder.
        """
        self.rounds.check_inputs()
        if not resume:
            self.folder.check_start()
        manifest = Manifest("run", self.settings.model_dump(by_alias=True), self.rounds.inputs())
        manifest.facts |= self.rounds.facts
        recipe = (read_manifest(self.folder.path) or {}).get("recipe") if resume else self._recipe
        manifest.facts |= {"recipe": recipe} if recipe else {}
        with ExitStack() as ending:
            if not self.folder.path.exists():
                ending.push(self._discard_after_error)
            ending.enter_context(lock or self.folder.lock(warn=logger.warning))
            if resume:
                self._check_same_work(manifest)
                self.folder.adopt(manifest.facts)
            else:
                self.folder.start(settings_toml, force=force, manifest=manifest.facts, warn=logger.warning)
            ending.enter_context(log_to_file(self.folder.path / "log.txt"))
            on_start()
            executor = builders.executor(self.settings, logs=self.folder.path / "logs")
            with closing(executor):
                self.executor = builders.tracked_executor(executor, self.settings, self.folder.path)
                finished = yield from self._run_with_advice()
            if finished:
                manifest.write(self.folder.path, counts={"rounds": self.state.rollout_id, "steps": self.state.step})
            return finished

    def _check_same_work(self, manifest: Manifest) -> None:
        """Raise SettingsError if another command began the run, or if the file that it reads has changed since."""
        self.folder.check_command(self.rounds.command)
        path, recorded = self.folder.path, read_manifest(self.folder.path) or {}
        before, now = (list((facts.get("inputs") or {}).values()) for facts in (recorded, manifest.facts))
        if before and now and before != now:
            names = ", ".join(manifest.facts["inputs"])
            raise SettingsError(
                f"{names}: has changed since {path} was begun, which would go on at another sample; put it back as it "
                f"was, or begin a new run with --name ANOTHER"
            )

    def _discard_after_error(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the new folder of a run that failed before its first output; an interrupted one can be resumed."""
        if kind is not None and issubclass(kind, Exception):
            self.folder.discard()

    def _run_with_advice(self) -> Reports:
        """Run; if training diverged, add to the error the last checkpoint and how to resume from it."""
        try:
            return (yield from self._run_with_restarts())
        except DivergedError as error:
            rounds = self.folder.checkpoints()
            advice = f"the last checkpoint is {self.folder.step(rounds[-1])}" if rounds else "no checkpoint was saved"
            raise DivergedError(f"{error}; {advice}; go on with: {self._resume_command} -s train.lr=LOWER") from error

    def _run_with_restarts(self) -> Reports:
        """Run; restart from the last checkpoint if a trainer or engine has died, at most run.max_restarts times."""
        for restarts_left in range(self.settings.run.max_restarts, -1, -1):
            try:
                with ExitStack() as ending:
                    return (yield from self._run_from_checkpoint(ending))
            except DiedError as error:
                if not restarts_left:
                    raise
                logger.warning(f"{error}; going on from the last checkpoint ({restarts_left} restarts left)")
        raise AssertionError("the last try returns or raises")

    def _run_from_checkpoint(self, ending: ExitStack) -> Reports:
        """Run from the newest checkpoint, or from the start; `ending` closes what is built.

        Trackers come first: one that cannot start is found before any work.
        """
        settings, total = self.settings, self.settings.run.num_rollout
        self.state = self.journal.rewind(logger.warning)
        if self.state.rollout_id:
            logger.info(f"resuming {self.folder.path} after round {self.state.rollout_id}")
        if total is not None and self.state.rollout_id >= total:
            self.folder.prune(settings.run.keep_checkpoints)  # the run may have been killed before it pruned
            logger.info(f"all {total} rounds are done; raise run.num_rollout to go on")
            return True
        self._start_trackers(ending)
        self._expect_rounds()
        with self.progress.phase("load"):
            parts = self._build_parts(ending)
        models = parts.models
        if self._is_evaluation_due():
            self._evaluate(parts)
        self._expect_rounds()
        self._prepare_profiler(models, ending)
        make_rounds, executor = self.rounds.stream(parts.side, models, self.journal.sampling, self.executor)
        reports = run(
            make_rounds,
            models.policy,
            parts.sync if self.rounds.samples else None,
            settings,
            executor=executor,
            reference=models.reference,
            teacher=models.teacher,
            critic=models.critic,
            state=self.state,
            hooks=self.hooks,
            timer=builders.round_timer(settings, parts.model, models.policy, progress=self.progress),
            waiting=self._waiting,
        )
        ending.callback(reports.close)  # type: ignore[attr-defined] # a generator
        return (yield from self._consume_reports(reports, parts))

    def _expect_rounds(self) -> None:
        """Let progress measure from here on; the time of what came before says nothing of the rounds."""
        self.progress.expect(self.rounds.count(), done=self.state.rollout_id)

    def _start_trackers(self, ending: ExitStack) -> None:
        self.journal.trackers = builders.start_trackers(
            self.settings,
            self.folder.path,
            resumed=self.journal.resumed,
            resumed_at=self.state.step if self.state.rollout_id else None,
            rounds=self.rounds.count(),
            done=self.state.rollout_id,
            progress=self.progress,
        )
        for tracker in self.journal.trackers:
            ending.callback(tracker.close)
        self.journal.track_last_save()

    def _prepare_profiler(self, models: builders.TrainableModels, ending: ExitStack) -> None:
        """Let run.profile write its traces, also where the run ends before them."""
        critic = models.separate_critic
        self.profiler = RoundProfiler(
            self.settings.run.profile, self.folder.path, policy=models.policy, critic=critic, reference=models.reference
        )
        ending.callback(self.profiler.close)

    def _build_parts(self, ending: ExitStack) -> RunParts:
        """Build the engines, if any, and the models with the weights of the checkpoint; warm the model up before."""
        model = prepare_model(self.settings, self.folder)
        side = self.rounds.service(model, executor=self.executor, folder=self.folder.path)
        if side is not None:
            ending.callback(side.close)
            side.report_to(self.progress)
        warmup = SftWarmup(self.settings, self.folder, self.journal, self.hooks, self.executor, self.interrupted)
        with self.progress.phase("warm-up" if self.settings.sft_warmup.data else "load"):
            model_folder = warmup.run(model, side)
        models = self.rounds.models(model_folder, executor=self.executor)
        ending.callback(models.close)
        self.journal.critic = models.separate_critic
        self.journal.load(models.policy)
        moving = builders.PeriodicReference(self.settings, models.reference, self.folder.path)
        moving.resume(self.state.rollout_id)
        sync = None
        if side is not None:
            sync = side.sync(models.policy)
            ending.callback(sync.close)
            if self._engines_sleep:
                sync.sleep()
        self._saved = self._place if self.state.rollout_id else None
        self._evaluated = self._place if self._has_evaluated(self.state.rollout_id) else None
        return RunParts(model, models, side, sync, moving)

    @property
    def _engines_sleep(self) -> bool:
        """Whether engines on the trainer's GPUs sleep between evaluations: no round is sampled meanwhile."""
        return self.settings.cluster.colocate and not self.rounds.samples

    @property
    def _place(self) -> tuple[int, int]:
        """Round and step after which the policy is."""
        return self.state.rollout_id, self.state.step

    def _has_evaluated(self, number: int) -> bool:
        return any(round_number == number for round_number, _ in self.journal.evaluations)

    def _is_evaluation_due(self) -> bool:
        """Whether to evaluate before going on: at the start, or because the evaluation of a round was abandoned."""
        number, eval_settings = self.state.rollout_id, self.settings.eval
        if number == 0:
            return eval_settings.before_train
        due = bool(eval_settings.interval) and number % (eval_settings.interval or 1) == 0
        return due and not self._has_evaluated(number)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Wait for the next round: until it is there, nothing of it has reached the policy."""
        self.profiler.before_round(self.state.rollout_id + 1)
        self._between_rounds = True
        yield
        self._between_rounds = False

    def _consume_reports(self, reports: Iterator[StepReport], parts: RunParts) -> Reports:
        """Record and yield every report; evaluate and save at their intervals, and after the last round."""
        samples: list[Sample] = []
        complete = False
        try:
            for report in reports:
                samples = [*([] if report.samples else samples), *report.samples]
                if self._end_step(report, samples, parts):
                    yield report
                    return False
                yield report
            with self.grace.shielded():
                self._evaluate(parts)
                self._save(parts, samples)
                complete = True
        except RoundAbandoned:
            if not complete:
                self._save_abandoned(parts, samples)
        if complete and (message := self.state.signal.closing_message(self._reward_check)):
            logger.warning(message)
        return complete

    def _end_step(self, report: StepReport, samples: Sequence[Sample], parts: RunParts) -> bool:
        """Record a step, and after a round evaluate and save; return whether an interrupt ends the run here."""
        settings, number = self.settings, report.rollout_id
        with self.grace.shielded():
            self.journal.record(report)
            if self.rounds.samples:
                check_log_prob_mismatch(report, settings.run)
            self.journal.sampling = report.sampling or self.journal.sampling
            if report.last_step_of_round:
                self.profiler.after_round(number)
                parts.moving.follow(number, parts.models.policy, self.folder.checkpoints())
                self.progress.reach(number)
            self._between_rounds = report.last_step_of_round
        if not report.last_step_of_round or number == settings.run.num_rollout:
            return False
        if settings.eval.interval and number % settings.eval.interval == 0:
            self._evaluate(parts)
        with self.grace.shielded():
            if self.interrupted():
                self._save(parts, samples)
                logger.warning(f"interrupted after round {number}; go on with: {self._resume_command}")
                return True
            if fault := lasting_lack_of_signal(self.state.signal, settings.run, self._reward_check):
                self._save(parts, samples)
                raise SlimectlError(
                    f"{fault}; go on all the same with: {self._resume_command} -s run.on_no_signal=warn"
                )
            if settings.run.save_interval and number % settings.run.save_interval == 0:
                self._save(parts, samples)
            else:
                self.journal.keep_round(self.folder.step(number), samples)
        return False

    def _save(self, parts: RunParts, samples: Sequence[Sample]) -> None:
        """Save a checkpoint, unless that of this step is there already."""
        if self._saved != self._place:
            with self.progress.phase("save"):
                self.journal.save(parts.models.policy, self.state, samples)
            self._saved = self._place

    def _save_abandoned(self, parts: RunParts, samples: Sequence[Sample]) -> None:
        """Save the state after the last whole round, if the policy has nothing of the next, and say how to go on."""
        number = self.state.rollout_id
        if self._between_rounds and number and number not in self.folder.checkpoints():
            self._save(parts, samples)
        rounds = self.folder.checkpoints()
        after = f"the last checkpoint is that of round {rounds[-1]}" if rounds else "there is no checkpoint yet"
        logger.warning(f"round {number + self._between_rounds} abandoned; {after}; go on with: {self._resume_command}")

    @property
    def _reward_check(self) -> str:
        """Commands that show why rewards are as they are."""
        return self.rounds.reward_check(self.folder.path, self.state.rollout_id)

    @property
    def _resume_command(self) -> str:
        return f"slimectl {self.rounds.command} --resume {self.folder.path}"

    def _evaluate(self, parts: RunParts) -> None:
        """Evaluate every dataset of [eval], record its metrics and write its samples, unless this step's are there."""
        if not self.settings.eval.data or self._evaluated == self._place:
            return
        started, version = time.perf_counter(), parts.models.policy.weight_version
        samples_by_dataset: dict[str, list[Sample]] = {}
        with self.progress.phase("eval"):
            metrics = self.rounds.held_out_metrics(parts.models)
        if parts.side is not None:
            dataset_metrics, samples_by_dataset = self._sample_evaluation(parts.side, parts.sync, version)
            metrics |= dataset_metrics
        seconds = time.perf_counter() - started
        with self.grace.shielded():
            self.journal.record_evaluation(self.state, version, metrics, seconds, samples_by_dataset)
            self._evaluated = self._place

    def _sample_evaluation(
        self, side: RolloutService, sync: WeightSynchronizer | None, version: str
    ) -> tuple[Metrics, dict[str, list[Sample]]]:
        """Return the metrics of the datasets that are sampled and graded, and their samples."""
        assert sync is not None, "engines have a synchronizer"
        if self._engines_sleep:
            sync.wake()
        if sync.version != version:
            sync.push()
        metrics: Metrics = {}
        samples_by_dataset: dict[str, list[Sample]] = {}
        for name in (name for name in self.settings.eval.data if name not in self.rounds.held_out):
            with self.progress.phase(f"eval {name}"):
                samples, dataset_metrics = side.sampler.evaluation(name, self.state.rollout_id)
            metrics |= dataset_metrics
            samples_by_dataset[name] = samples
            if self.settings.eval.keep_samples:
                out = self.folder.path / "eval" / f"{name}-{self.state.rollout_id:06d}.jsonl"
                self.journal.keep_samples(out, samples)
        if self._engines_sleep:
            sync.sleep()
        return metrics, samples_by_dataset
