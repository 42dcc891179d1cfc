"""Sources of a run's rounds: samples of its own policy, or a file of samples."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

from slimectl.algorithms.preferences import preference_pairs
from slimectl.data.io import is_pipe, split_slice
from slimectl.data.manifest import other_model
from slimectl.data.prompts import ordered_rows
from slimectl.data.sources import open_table
from slimectl.errors import RecordError, SettingsError
from slimectl.protocols import Executor
from slimectl.runtime import builders
from slimectl.runtime.initial_model import check_model, check_runnable, check_sources
from slimectl.runtime.rollout_worker import RolloutService
from slimectl.settings import Settings
from slimectl.settings.algorithm import Pairwise
from slimectl.settings.needs import AlgorithmSection
from slimectl.stages.advantages import Models
from slimectl.stages.evaluate import resolve_dataset_settings
from slimectl.stages.held_out import held_out_metrics
from slimectl.stages.recorded_rounds import Numbered, SampleFiles, recorded_rounds, sample_batches
from slimectl.stages.run import streamed
from slimectl.stages.score import reward_number
from slimectl.system.stdio import logger
from slimectl.types import Metrics, Prompt, RolloutBatch, Sample, SamplerState, Status

MakeRounds = Callable[[], Iterator[RolloutBatch]]


@dataclass
class SampledRounds:
    """Rounds of `slimectl run`: the policy responds to prompts, and a reward grades the responses."""

    settings: Settings
    command: ClassVar[str] = "run"
    samples: ClassVar[bool] = True
    """Whether the engines get the policy's weights for every round."""
    held_out: ClassVar[frozenset[str]] = frozenset()
    """Datasets of [eval] on which the loss is measured without sampling."""

    def check(self) -> None:
        """Check the settings. Raises SettingsError before anything is loaded."""
        check_runnable(self.settings)

    def check_inputs(self) -> None:
        """Check model, backends, and the first prompt of every source, before the run's folder is created."""
        sources = [[source] for source in self.settings.eval.sources.values()]
        check_sources(self.settings, [self.settings.rollout.data, self.settings.sft_warmup.data, *sources])

    @property
    def paths(self) -> Sequence[str]:
        """The prompt sources."""
        return self.settings.rollout.data

    @property
    def facts(self) -> dict[str, str]:
        """Entries of the run's manifest that tell a resume the kind of run."""
        return {"command": self.command}

    def count(self) -> int | None:
        """Return the number of rounds, if it is known."""
        return self.settings.run.num_rollout

    def service(self, model: Path, *, executor: Executor, folder: Path) -> RolloutService | None:
        """Start the engines that sample rounds and evaluations."""
        return RolloutService(self.settings, model, executor=executor, folder=folder)

    def models(self, model: Path, *, executor: Executor) -> builders.TrainableModels:
        """Build the models of the run from the initial one."""
        return builders.sampling_models(self.settings, model, executor=executor)

    def held_out_metrics(self, models: builders.TrainableModels) -> Metrics:
        """Return no metrics: every dataset is sampled and graded."""
        return {}

    def stream(
        self,
        side: RolloutService | None,
        models: builders.TrainableModels,
        state: SamplerState,
        executor: Executor,
    ) -> MakeRounds:
        """Return a function that streams the rounds after `state` from the executor."""
        assert side is not None
        return streamed(partial(side.sampler.rounds, state), executor, self.settings.run)

    def reward_check(self, run: Path, rounds: int) -> str:
        """Return the commands that explain the rewards of the run's samples."""
        config, samples, first = shlex.quote(str(run / "run.toml")), "samples.jsonl", ""
        if self.settings.run.keep_samples:
            samples = shlex.quote(str(run / f"step_{rounds:06d}" / samples))
        else:
            first = f"slimectl rollout -c {config} --model {shlex.quote(str(run / 'latest'))} -o {samples}, then "
        return reward_check(samples, first=first, options=f" -c {config}")


@dataclass
class RecordedRounds:
    """Rounds of `slimectl train`: the samples of files, run.num_epoch times or for run.num_rollout rounds."""

    settings: Settings
    files: SampleFiles
    command: ClassVar[str] = "train"
    samples: ClassVar[bool] = False

    @property
    def paths(self) -> Sequence[str]:
        """The files of samples."""
        return self.files.paths

    def check(self) -> None:
        """Check the settings. Raises SettingsError before anything is loaded."""
        settings = self.settings
        check_model(settings)
        if pipe := next(filter(is_pipe, self.paths), None):
            raise SettingsError(
                f"{pipe}: is a pipe, but a run reads its samples again when it is resumed. Write them to a file first, "
                f"or drop --name."
            )
        for name, value in {
            "sft_warmup.data": settings.sft_warmup.data,
            "run.async_level": settings.run.async_level,
        }.items():
            if value:
                raise SettingsError(f"{name}: has no effect on training from a file of samples. Drop it.")
        graded = sorted(settings.eval.data.keys() - self.held_out)
        if graded and settings.algorithm.trained_output == "values":
            raise SettingsError(
                f"eval.data.{graded[0]}: {settings.algorithm.name} trains a model of values, which has no responses to "
                f"grade. Drop the verifier to measure the loss on its preferences."
            )

    def check_inputs(self) -> None:
        """Check model, backends, and that each file has rows, before the run's folder is created."""
        sources = self.settings.eval.sources
        graded = [[source] for name, source in sources.items() if name not in self.held_out]
        check_sources(self.settings, graded, samples=bool(graded))
        for path in (*self.paths, *(sources[name] for name in self.held_out)):
            if next(ordered_rows([path]), None) is None:
                raise RecordError(f"{path}: no samples. Check the messages of the stage that wrote the file.")
        if self.settings.model.path is not None:
            warn_of_other_model(self.settings.algorithm, self.paths, builders.model_folder(self.settings.model.path))

    @cached_property
    def held_out(self) -> frozenset[str]:
        """Datasets of [eval] without a verifier: demonstrations and preferences, for which the loss is measured."""
        if self.settings.algorithm.trains_on == "rollouts":
            return frozenset()
        return frozenset(name for name in self.settings.eval.data if not self._is_graded(name))

    def _is_graded(self, name: str) -> bool:
        """Return whether the settings of a dataset, or its first prompt, name a verifier."""
        own = resolve_dataset_settings(self.settings, name)
        source = own.eval.sources[name]
        if own.score.custom_rm_path or own.score.rm_type or own.score.rm:
            return True
        if is_pipe(source):  # rejected later, and not read before
            return False
        with suppress(RecordError):  # preferences need no prompt
            first = next(builders.prompts(own, [source], shuffle=False), None)
            return first is not None and "rm_type" in first.metadata
        return False

    def held_out_metrics(self, models: builders.TrainableModels) -> Metrics:
        """Return the losses on the held-out datasets."""
        metrics: Metrics = {}
        for name in sorted(self.held_out):
            own, too_long = resolve_dataset_settings(self.settings, name), deque[Prompt]()
            rollout = own.rollout.model_copy(update={"shuffle": False})
            data = RecordedRounds(own.model_copy(update={"rollout": rollout}), SampleFiles([own.eval.sources[name]]))
            samples = (s for _, s in data._read(models.folder, too_long, epochs=1))
            metrics |= held_out_metrics(name, samples, Models(models.policy, models.critic, models.frozen), own)
            if too_long:
                metrics[f"eval/{name}/prompts_too_long"] = float(len(too_long))
        return metrics

    @property
    def facts(self) -> dict[str, str]:
        """Entries of the run's manifest, including some that are not in the settings."""
        return {"command": self.command, "on_error": "stop" if self.files.on_bad_line is None else "skip"}

    @property
    def _epochs(self) -> int | None:
        return None if self.settings.run.num_rollout else self.settings.run.num_epoch or 1

    def count(self) -> int | None:
        """Return the number of rounds, including rows that are too long to be trained on."""
        if self._epochs is None:
            return self.settings.run.num_rollout
        plain = builders.has_plain_rows(self.settings.algorithm, self.paths)
        rollouts = len(open_table(self.paths, replay=True)) if plain else self._count_rollouts(None)
        return -(-rollouts * self._epochs // self.settings.rollouts_per_round)

    def _count_rollouts(self, model: Path | None, *, only_trained: bool = False) -> int:
        """Return the number of rollouts, or of preference groups, in the files. Without a model, count samples.

        With `only_trained`, failed rollouts do not count, and a group counts as the number of its pairs.
        """
        # Training reports bad lines.
        silent = SampleFiles(self.paths, None if self.files.on_bad_line is None else lambda error: None)
        samples = (sample for _, sample in RecordedRounds(self.settings, silent)._read(model, deque(), epochs=1))
        count = self._trained if only_trained else lambda batch: 1
        return sum(count(batch) for batch in sample_batches(samples, self.settings.algorithm, 1))

    def _trained(self, batch: Sequence[Sample]) -> int:
        """Return how many units of a batch are trained on: 0 or 1 for a rollout, or the pairs of a group."""
        algorithm, key = self.settings.algorithm, self.settings.score.reward_key
        answered = [sample for sample in batch if sample.status is not Status.FAILED]
        if not isinstance(algorithm, Pairwise):
            return int(bool(answered))
        rewards = [reward_number(sample, key) for sample in answered if sample.reward is not None]
        return len(preference_pairs(rewards, algorithm.pairs))

    def _read(
        self, model: Path | None, too_long: deque[Prompt], *, epochs: int | None, start: int = 0
    ) -> Iterator[Numbered]:
        tokenizer = None if model is None else builders.tokenizer(model)
        context = None if model is None else builders.context_length(self.settings.rollout, model)
        return builders.training_samples(
            self.settings, self.files, tokenizer,
            context=context, on_skipped=too_long.append, epochs=epochs, start=start,
        )  # fmt: skip

    def service(self, model: Path, *, executor: Executor, folder: Path) -> RolloutService | None:
        """Start the engines that sample evaluations, if there are any."""
        if self.held_out == self.settings.eval.data.keys():
            return None
        return RolloutService(self.settings, model, executor=executor, folder=folder)

    def models(self, model: Path, *, executor: Executor) -> builders.TrainableModels:
        """Build the models of the training from the initial one."""
        rollouts = self.scheduled_rollouts(model)
        return builders.trainable_models(self.settings, model, executor=executor, rollouts=rollouts)

    def scheduled_rollouts(self, model: Path) -> int | None:
        """Return the number of rollouts in the file if the learning rate depends on it, else None."""
        if not self.settings.train.needs_total_steps or self._epochs is None:
            return None
        return self._count_rollouts(model, only_trained=not self.settings.one_step_per_round)

    def stream(
        self,
        side: RolloutService | None,
        models: builders.TrainableModels,
        state: SamplerState,
        executor: Executor,
    ) -> MakeRounds:
        """Return a function that streams the rounds after `state` in this process."""
        return streamed(partial(self._rounds, models.folder, state), builders.LocalExecutor(), self.settings.run)

    def _rounds(self, model: Path, state: SamplerState) -> Iterator[RolloutBatch]:
        """Yield the rounds after `state`."""
        too_long: deque[Prompt] = deque()
        samples = self._read(model, too_long, epochs=self._epochs, start=state.position)
        rounds = recorded_rounds(samples, self.settings, too_long=too_long, before=state.rounds)
        last = self.settings.run.num_rollout
        return islice(rounds, None if last is None else max(0, last - state.rounds))

    def reward_check(self, run: Path, rounds: int) -> str:
        """Return the commands that explain the rewards of the samples."""
        return reward_check(shlex.join(self.paths))


def warn_of_other_model(algorithm: AlgorithmSection, paths: Sequence[str], model: Path) -> None:
    """Warn if samples come from another model than the one that is trained, according to their manifest."""
    is_own = algorithm.trains_on == "rollouts" and not algorithm.learns_from_teachers_samples
    files = [Path(split_slice(path)[0]) for path in paths] if is_own else []
    for message in filter(None, (other_model(file, model) for file in files)):
        logger.warning(message)


def reward_check(samples: str, *, first: str = "", options: str = "") -> str:
    """Return the commands that explain the rewards of samples."""
    return (
        f"Look at rewards with: {first}slimectl score {samples}{options} --explain (why each), --check (is it fit to "
        f"train on)"
    )
