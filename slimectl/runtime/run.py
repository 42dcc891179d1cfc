"""Runs a training run from settings to result: prepare, SFT warm-up, loop, evaluate, save, resume."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl import builders
from slimectl.data.io import is_pipe
from slimectl.data.locks import Lock
from slimectl.data.manifest import Manifest
from slimectl.data.ownership import CHECKPOINT_FILES, MANIFEST
from slimectl.data.run_dir import RunDir, write_folder, write_text
from slimectl.errors import DiedError, DivergedError, SettingsError, SlimectlError
from slimectl.hooks import check_hooks
from slimectl.hooks.user_hooks import UserHooks
from slimectl.protocols import Policy
from slimectl.runtime.recorder import RunRecorder
from slimectl.runtime.rollout_worker import RolloutService
from slimectl.settings import Settings
from slimectl.settings.algorithm import Sft
from slimectl.settings.needs import Need
from slimectl.stages.evaluate import resolve_dataset_settings
from slimectl.stages.rollout import demonstrations
from slimectl.stages.run import run
from slimectl.stages.train import TrainState, train
from slimectl.stdio import logger
from slimectl.types import Metrics, Prompt, Sample, StepReport

if TYPE_CHECKING:
    from slimectl.weight_sync.base import WeightSynchronizer

Reports = Generator[StepReport, None, bool]
"""The reports of a run, and whether it reached its end."""

WARMUP_CHECK = 128
"""Number of prompts on which the warm-up measures accuracy."""


class TrainingRun:
    """A training run in its folder. `interrupted` is called after every round: true saves and ends the run."""

    def __init__(self, settings: Settings, *, interrupted: Callable[[], bool] = lambda: False) -> None:
        check_runnable(settings)
        self.settings = settings
        self.interrupted = interrupted
        self.folder = RunDir(Path(settings.run.dir) / (settings.run.name or "run"))
        self.hooks = UserHooks(settings)
        self.journal = RunRecorder(self.folder, settings, self.hooks)
        self.executor: Any = None
        self.state = TrainState()
        check_hooks(settings)  # hooks are loaded before the run's folder is created
        for name in settings.eval.data:
            check_hooks(resolve_dataset_settings(settings, name), "rollout.", "score.")
        builders.reward(settings)

    def execute(
        self, settings_toml: str, *, resume: bool = False, force: bool = False, lock: Lock | None = None
    ) -> bool:
        """Run to the end; return False if interrupted. See `reports`."""
        reports = self.reports(settings_toml, resume=resume, force=force, lock=lock)
        while True:
            try:
                next(reports)
            except StopIteration as end:
                finished: bool = end.value
                return finished

    def reports(
        self, settings_toml: str, *, resume: bool = False, force: bool = False, lock: Lock | None = None
    ) -> Reports:
        """Yield the report of every step once it is recorded; the value at the end is False if interrupted.

        `lock` is the folder's lock, if the caller holds it. Steps after the last checkpoint are reported again if a
        trainer's rank died.

        Raises SettingsError if the folder holds a run, if a run is active there, or if it is not a run's folder.
        """
        self._validate_inputs()
        if not resume:
            self.folder.check_start()
        manifest = Manifest("run", self.settings.model_dump(by_alias=True), {})
        with ExitStack() as ending:
            ending.enter_context(lock or self.folder.lock(warn=logger.warning))
            if resume:
                self.folder.adopt(manifest.facts)
            else:
                self.folder.start(settings_toml, force=force, manifest=manifest.facts, warn=logger.warning)
            self.executor = builders.executor(self.settings, logs=self.folder.path / "logs")
            with closing(self.executor):
                finished = yield from self._run_with_advice(self._prepare_model())
            if finished:
                manifest.write(self.folder.path, counts={"rounds": self.state.rollout_id, "steps": self.state.step})
            return finished

    def _run_with_advice(self, model: Path) -> Reports:
        """Run; if training diverged, add to the error the last checkpoint and how to resume from it."""
        try:
            return (yield from self._run_with_restarts(model))
        except DivergedError as error:
            rounds = self.folder.checkpoints()
            advice = f"the last checkpoint is {self.folder.step(rounds[-1])}" if rounds else "no checkpoint was saved"
            command = f"slimectl run --resume {self.folder.path} -s train.lr=LOWER"
            raise DivergedError(f"{error}; {advice}; go on with: {command}") from error

    def _run_with_restarts(self, model: Path) -> Reports:
        """Run; restart from the last checkpoint if a trainer or engine has died, at most run.max_restarts times."""
        for restarts_left in range(self.settings.run.max_restarts, -1, -1):
            try:
                side = RolloutService(self.settings, model, executor=self.executor, folder=self.folder.path)
                with closing(side):
                    return (yield from self._loop(self._run_sft_warmup(model, side), side))
            except DiedError as error:
                if not restarts_left:
                    raise
                logger.warning(f"{error}; going on from the last checkpoint ({restarts_left} restarts left)")
        raise AssertionError("the last try returns or raises")

    def _validate_inputs(self) -> None:
        """Check model and backends and read one prompt of every source, before the run's folder is created."""
        settings = self.settings
        if settings.model.path is not None:
            builders.source_of(settings.model.path)
        builders.check_executor(settings)
        builders.check_policy(settings)
        builders.check_engine(settings)
        builders.check_trackers(settings)
        held_out = [[source] for source in settings.eval.sources.values()]
        builders.check_pipes(settings)
        for sources in [list(settings.rollout.data), list(settings.sft_warmup.data), *held_out]:
            if sources and not any(map(is_pipe, sources)):
                next(builders.prompts(settings, sources, shuffle=False))

    # --- the initial model -----------------------------------------------------------------------------------------

    def _prepare_model(self) -> Path:
        """Return the model directory: the given one, converted from a GGUF file, or created from a card."""
        path, card, target = self.settings.model.path, self.settings.model.card, self.folder.path / "model"
        if path is not None and not builders.is_gguf(path):
            return builders.model_folder(path, verify=self.settings.model.verify)
        if not (target / MANIFEST).exists():
            if path is not None:
                logger.info(f"converting {path}")
                builders.convert(path, target)
            else:
                new_model = partial(builders.create_model, str(card), seed=self.settings.run.seed)
                write_folder(target, new_model, names=CHECKPOINT_FILES)
        return target

    def _run_sft_warmup(self, model: Path, side: RolloutService) -> Path:
        """Return the model after the SFT warm-up on labels, if [sft_warmup] is set."""
        warmup, target = self.settings.sft_warmup, self.folder.path / "warmup"
        if (target / MANIFEST).exists() or not warmup.data:
            return target if (target / MANIFEST).exists() else model
        self.folder.cut_back({})  # records of an interrupted warm-up
        tokenizer = builders.tokenizer(model)
        policy = builders.policy(self.settings, model, total_steps=None, lr=warmup.lr, executor=self.executor)
        sync = side.sync(policy)
        batches = self.settings.train.model_copy(
            update={"global_batch_size": warmup.batch_size, "num_steps_per_rollout": None}
        )
        sft = self.settings.model_copy(update={"algorithm": Sft(), "train": batches})
        prompts = builders.prompts(self.settings, list(warmup.data), epochs=None)
        too_long: list[Prompt] = []
        context = builders.context_length(self.settings, model)
        samples = demonstrations(
            prompts, tokenizer, self.settings.rollout, context=context, left_out=too_long.append
        )  # fmt: skip
        logger.info(f"warming up on labels until {warmup.target_accuracy:.0%} of the answers are right")
        for report in islice(train(samples, policy, sft, hooks=self.hooks), warmup.max_steps):
            if self.interrupted():
                logger.warning(
                    f"interrupted in the warm-up; begin it again with: slimectl run --resume {self.folder.path}"
                )
                raise KeyboardInterrupt
            train_metrics = {name: value for name, value in report.metrics.items() if name.startswith("train/")}
            metrics = {f"warmup/{name.removeprefix('train/')}": value for name, value in train_metrics.items()}
            if too_long:
                metrics["warmup/prompts_too_long"] = float(len(too_long))
                too_long.clear()
            if report.step % warmup.check_interval == 0:
                sync.push()
                # On the first training prompts of the run: the held-out ones stay unseen.
                sources = list(self.settings.rollout.data or warmup.data)
                metrics["warmup/accuracy"] = side.sampler.accuracy(sources, WARMUP_CHECK)
                logger.info(f"warm-up step {report.step}: accuracy {metrics['warmup/accuracy']:.2f}")
            self.journal.append("metrics.jsonl", {"step": report.step, "metrics": metrics})
            if metrics.get("warmup/accuracy", 0.0) >= warmup.target_accuracy:
                break
        self._save_warmup(policy, target)
        sync.close()
        policy.close()
        return target

    def _save_warmup(self, policy: Policy, target: Path) -> None:
        sizes = self.folder.sizes()

        def fill(staged: Path) -> None:
            policy.save(staged)
            write_text(staged / "state.json", json.dumps({"sizes": sizes}) + "\n")

        write_folder(target, fill, names=CHECKPOINT_FILES)

    # --- the loop --------------------------------------------------------------------------------------------------

    def _loop(self, model: Path, side: RolloutService) -> Reports:
        settings, total = self.settings, self.settings.run.num_rollout
        with ExitStack() as ending:
            policy = builders.policy(
                settings, model, total_steps=builders.total_steps(settings), executor=self.executor
            )  # fmt: skip
            ending.callback(policy.close)
            reference = builders.reference(settings, model, executor=self.executor)
            if reference is not None:
                ending.callback(reference.close)
            teacher = builders.teacher(settings, model, executor=self.executor)
            critic = self.journal.critic = builders.critic(settings, model, executor=self.executor)
            for part in (teacher, critic):
                if part is not None:
                    ending.callback(part.close)
            self.state = self.journal.restore(policy, logger.warning)
            moving = builders.PeriodicReference(settings, reference, self.folder.path)
            moving.resume(self.state.rollout_id)
            if self.state.rollout_id:
                logger.info(f"resuming {self.folder.path} after round {self.state.rollout_id}")
            if total is not None and self.state.rollout_id >= total:
                self.folder.prune(settings.run.keep_checkpoints)  # the run may have been killed before it pruned
                logger.info(f"all {total} rounds are done; raise run.num_rollout to go on")
                return True
            self.journal.trackers = builders.trackers(
                settings, self.folder.path, resumed_at=self.state.step or None, done=self.state.rollout_id
            )
            for tracker in self.journal.trackers:
                ending.callback(tracker.close)
            sync = side.sync(policy)
            ending.callback(sync.close)
            if self.state.rollout_id == 0 and settings.eval.before_train:
                self._evaluate(side, sync, policy.weight_version)
            reports = run(
                partial(side.sampler.rounds, self.journal.sampling),
                policy,
                sync,
                settings,
                executor=self.executor,
                reference=reference,
                teacher=teacher,
                critic=critic,
                state=self.state,
                hooks=self.hooks,
            )
            ending.callback(reports.close)  # type: ignore[attr-defined] # a generator
            return (yield from self._consume_reports(reports, policy, side, sync, moving))

    def _consume_reports(
        self,
        reports: Iterator[StepReport],
        policy: Policy,
        side: RolloutService,
        sync: WeightSynchronizer,
        moving: builders.PeriodicReference,
    ) -> Reports:
        """Record and yield every report; evaluate and save at their intervals, and after the last round."""
        settings = self.settings
        samples: list[Sample] = []
        for report in reports:
            self.journal.record(report)
            self._check_logprob_mismatch(report)
            self.journal.sampling = report.sampling or self.journal.sampling
            samples = [*([] if report.samples else samples), *report.samples]
            number, last = report.rollout_id, report.rollout_id == settings.run.num_rollout
            if report.last_step_of_round:
                moving.follow(number, policy, self.folder.checkpoints())
            if not report.last_step_of_round or last:
                yield report
                continue
            if settings.eval.interval and number % settings.eval.interval == 0:
                self._evaluate(side, sync, report.weight_version)
            if self.interrupted():
                self.journal.save(policy, self.state, samples)
                logger.warning(
                    f"interrupted after round {number}; go on with: slimectl run --resume {self.folder.path}"
                )
                yield report
                return False
            if settings.run.save_interval and number % settings.run.save_interval == 0:
                self.journal.save(policy, self.state, samples)
            elif settings.run.keep_samples:
                self.journal.keep_samples(self.folder.step(number) / "samples.jsonl", samples)
            yield report
        self._evaluate(side, sync, policy.weight_version)
        self.journal.save(policy, self.state, samples)
        return True

    def _check_logprob_mismatch(self, report: StepReport) -> None:
        """Warn, or stop, if engine and trainer compute different log-probabilities for the same tokens."""
        run = self.settings.run
        difference = report.metrics.get("train/train_rollout_logprob_abs_diff", 0.0)
        if run.max_logprob_mismatch is None or difference <= run.max_logprob_mismatch:
            return
        if report.metrics.get("rollout/staleness/max"):  # tokens of older weights differ by design
            return
        message = (
            f"round {report.rollout_id}: engine and trainer differ by {difference:.3f} a token on average, more than "
            f"run.max_logprob_mismatch = {run.max_logprob_mismatch:g}; `slimectl doctor --engine` looks for the cause"
        )
        if run.on_logprob_mismatch == "stop":
            raise SlimectlError(message)
        logger.warning(message)

    def _evaluate(self, side: RolloutService, sync: WeightSynchronizer, version: str) -> None:
        """Evaluate every dataset of [eval], record its metrics and write its samples."""
        if not self.settings.eval.data:
            return
        if sync.version != version:
            sync.push()
        metrics: Metrics = {}
        started = time.perf_counter()
        samples_by_dataset: dict[str, list[Sample]] = {}
        for name in self.settings.eval.data:
            samples, dataset_metrics = side.sampler.evaluation(name, self.state.rollout_id)
            metrics |= dataset_metrics
            samples_by_dataset[name] = samples
            if self.settings.eval.keep_samples:
                out = self.folder.path / "eval" / f"{name}-{self.state.rollout_id:06d}.jsonl"
                self.journal.keep_samples(out, samples)
        self.journal.record_evaluation(self.state, version, metrics, time.perf_counter() - started, samples_by_dataset)


def check_runnable(settings: Settings) -> None:
    """Check the settings that only a whole run needs. Raises SettingsError before anything is loaded."""
    if settings.model.path is None and settings.model.card is None:
        raise SettingsError("model.path: no model is given; add --model DIR, or model.card to build a new one")
    if not settings.rollout.data and settings.rollout.data_source_path is None:
        raise SettingsError("rollout.data: no prompts are given; add --data FILE")
    if settings.algorithm.trains_on != "rollouts":
        kind = "demonstrations" if settings.algorithm.trains_on == "demonstrations" else "preferences or scored samples"
        raise SettingsError(
            f"algorithm.name: {settings.algorithm.name} needs no rollouts; use `slimectl train` on {kind}"
        )
    if Need.GROUPS in settings.algorithm.needs and settings.rollout.n_samples_per_prompt == 1:
        raise SettingsError(
            f"rollout.n_samples_per_prompt: 1 gives groups of one, and {settings.algorithm.name} compares answers to a "
            f"prompt with one another; sample at least 2"
        )
    if settings.train.lr_decay_style != "constant" and not (settings.train.lr_decay_iters or settings.run.num_rollout):
        raise SettingsError(
            f"train.lr_decay_style: {settings.train.lr_decay_style} needs an end; give run.num_rollout or "
            f"train.lr_decay_iters"
        )
