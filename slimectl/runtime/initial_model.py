"""Prepares a run: checks its inputs, creates or converts the model, and warms it up on labels."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from slimectl.data.atomic_replace import write_text
from slimectl.data.io import is_pipe
from slimectl.data.metrics_catalogue import is_evaluation_metric
from slimectl.data.ownership import CHECKPOINT_FILES, MANIFEST
from slimectl.data.run_dir import RunDir, write_folder
from slimectl.errors import SettingsError
from slimectl.plugins.garbage import collection_paused
from slimectl.protocols import Policy
from slimectl.runtime import builders
from slimectl.runtime.capacity import configuration
from slimectl.runtime.grace import RoundAbandoned
from slimectl.runtime.recorder import RunRecorder
from slimectl.runtime.rollout_worker import RolloutService
from slimectl.settings import Settings
from slimectl.settings.algorithm import Sft
from slimectl.settings.needs import Need
from slimectl.stages.advantages import Models
from slimectl.stages.rollout import demonstrations
from slimectl.stages.train import train
from slimectl.system.stdio import logger
from slimectl.types import Prompt

WARMUP_CHECK = 128
"""Number of prompts on which the warm-up measures accuracy."""


def check_runnable(settings: Settings) -> None:
    """Check settings that only a whole run needs. Raises SettingsError before anything is loaded."""
    check_model(settings)
    check_algorithm(settings)
    if not settings.rollout.data and settings.rollout.data_source_path is None:
        raise SettingsError("rollout.data: no prompts are given. Add --data FILE.")


def check_algorithm(settings: Settings) -> None:
    """Raise SettingsError if a run cannot give the algorithm what it needs."""
    if settings.algorithm.trains_on != "rollouts":
        kind = "demonstrations" if settings.algorithm.trains_on == "demonstrations" else "preferences or scored samples"
        raise SettingsError(
            f"algorithm.name: {settings.algorithm.name} needs no rollouts. Use `slimectl train` on {kind}."
        )
    if Need.GROUPS in settings.algorithm.needs and settings.rollout.n_samples_per_prompt == 1:
        raise SettingsError(
            f"rollout.n_samples_per_prompt: 1 gives groups of one, and {settings.algorithm.name} compares the "
            f"responses to a prompt with each other. Sample at least 2."
        )
    functions = settings.rollout.function_path, settings.score.custom_rm_path, settings.score.allow_paths_in_records
    gives_turn_rewards = settings.has_agent or any(functions)
    if Need.TURN_REWARDS in settings.algorithm.needs and not gives_turn_rewards:
        raise SettingsError(
            f"algorithm.name: {settings.algorithm.name} needs a reward for each turn, and no environment, agent or "
            f"function gives one. Set rollout.env, rollout.agent, rollout.custom_generate_function_path or "
            f"score.custom_rm_path."
        )
    if (setting := settings.train.needs_total_steps) and not settings.run.num_rollout:
        raise SettingsError(f"{setting} needs a number of steps. Set run.num_rollout or train.lr_decay_iters.")


def check_best(settings: Settings) -> None:
    """Raise SettingsError if run.save_best is not the name of a metric of an evaluation."""
    name = settings.run.save_best
    datasets = list(settings.eval.datasets)
    if name is not None and not is_evaluation_metric(name.removeprefix("eval/"), datasets):
        raise SettingsError(
            f"run.save_best: {name!r} is not a metric of an evaluation of {' or '.join(datasets)}. Set it to "
            f"{datasets[0]}_accuracy or another name that `slimectl metrics eval` lists."
        )


def check_model(settings: Settings) -> None:
    """Raise SettingsError if no model is given, or if the metric of run.save_best does not exist."""
    check_best(settings)
    if settings.model.path is None and settings.model.card is None:
        raise SettingsError("model.path: no model is given. Add --model DIR, or model.card to build a new one.")


def check_sources(settings: Settings, sources: Sequence[list[str]], *, samples: bool = True) -> None:
    """Check model and backends and read one prompt of every source, before the run's folder is created.

    The engine is checked only if the run `samples`.
    """
    if settings.model.path is not None:
        builders.source_of(settings.model.path)
    builders.executor_backend(settings).check(settings)
    builders.check_policy(settings)
    if samples:
        builders.check_engine(settings)
        builders.check_middlewares(settings.engine, servers=settings.uses_servers)
        if (config := configuration(settings)) is not None:
            builders.check_stop_tokens(settings, config)
    builders.check_trackers(settings)
    builders.check_pipes(settings)
    for source in sources:
        if source and not any(map(is_pipe, source)):
            next(builders.prompts(settings, source, shuffle=False))
            if samples:
                builders.check_images(settings, source, servers=settings.uses_servers)


def prepare_model(settings: Settings, folder: RunDir) -> Path:
    """Return the model directory: the given one, its conversion, or one created from a card.

    GGUF files are converted, and so is torch_dist for an engine that does not read it.
    """
    path, card, target = settings.model.path, settings.model.card, folder.path / "model"
    if path is not None and not builders.is_gguf(path):
        source = builders.model_folder(path, verify=settings.model.verify)
        if builders.engine_reads(settings, source):
            return source
    if not (target / MANIFEST).exists():
        if path is not None:
            logger.info(f"converting {path}")
            builders.convert_checkpoint(path, target)
        else:
            new_model = partial(builders.create_model, str(card), seed=settings.run.seed)
            write_folder(target, new_model, names=CHECKPOINT_FILES)
    return target


@dataclass
class SftWarmup:
    """Supervised steps on labels, until the model is accurate enough to learn from rewards ([sft_warmup])."""

    recorder: RunRecorder
    executor: Any
    interrupted: Callable[[], bool]

    def __post_init__(self) -> None:
        self.settings, self.folder = self.recorder.settings, self.recorder.folder

    def run(self, model: Path, side: RolloutService | None) -> Path:
        """Return the model after the warm-up, or the given model if [sft_warmup] is not set."""
        warmup, target = self.settings.sft_warmup, self.folder.path / "warmup"
        if side is None or (target / MANIFEST).exists() or not warmup.data:
            return target if (target / MANIFEST).exists() else model
        tokenizer = builders.tokenizer(model)
        rollout = self.settings.rollout.model_copy(update={"temperature": 1.0})  # labels are not sampled
        imitating = self.settings.model_copy(update={"rollout": rollout})
        with collection_paused():
            policy = builders.policy(imitating, model, total_steps=None, lr=warmup.lr, executor=self.executor)
        sync = side.sync(policy)
        batches = self.settings.train.model_copy(
            update={"global_batch_size": warmup.batch_size, "num_steps_per_rollout": None}
        )
        sft = self.settings.model_copy(update={"algorithm": Sft(), "train": batches})
        prompts = builders.prompts(self.settings, list(warmup.data), epochs=None, demonstrations=True)
        too_long: list[Prompt] = []
        context = builders.context_length(self.settings.rollout, model)
        samples = demonstrations(
            prompts, tokenizer, self.settings.rollout, context=context, on_skipped=too_long.append
        )  # fmt: skip
        logger.info(f"warming up on labels until {warmup.target_accuracy:.0%} of the responses are right")
        steps = (report for report in train(samples, Models(policy), sft, hooks=self.recorder.hooks) if report.is_step)
        for report in islice(steps, warmup.max_steps):
            if self.interrupted():
                logger.warning("interrupted during the warm-up. A resumed run starts the warm-up again.")
                raise RoundAbandoned
            train_metrics = {name: value for name, value in report.metrics.items() if name.startswith("train/")}
            metrics = {f"warmup/{name.removeprefix('train/')}": value for name, value in train_metrics.items()}
            if too_long:
                metrics["warmup/prompts_too_long"] = float(len(too_long))
                too_long.clear()
            if report.step % warmup.check_interval == 0:
                sync.push()
                # Measured on the first training prompts of the run, so the held-out ones stay unseen.
                sources = list(self.settings.rollout.data or warmup.data)
                metrics["warmup/accuracy"] = side.sampler.accuracy(sources, WARMUP_CHECK)
                logger.info(f"warm-up step {report.step}: accuracy {metrics['warmup/accuracy']:.2f}")
            self.recorder.record_warmup(report.step, metrics)
            if metrics.get("warmup/accuracy", 0.0) >= warmup.target_accuracy:
                break
        self._save(policy, target)
        sync.close()
        policy.close()
        return target

    def _save(self, policy: Policy, target: Path) -> None:
        sizes = self.folder.sizes()

        def fill(staged: Path) -> None:
            policy.save(staged)
            write_text(staged / "state.json", json.dumps({"sizes": sizes}) + "\n")

        write_folder(target, fill, names=CHECKPOINT_FILES)
