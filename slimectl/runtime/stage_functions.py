"""Stages and runs from settings: iterables in, iterators out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slimectl import recipes
from slimectl.data.atomic_replace import refuse_existing
from slimectl.data.streams import of_type, tee
from slimectl.errors import RecordError, SettingsError
from slimectl.hooks import check_hooks
from slimectl.protocols import LogProbModel, Tracker
from slimectl.rewards import Verifier
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.settings.layers import Layer, from_environment, from_file, nested
from slimectl.settings.loading import resolve
from slimectl.settings.secret import check_complete
from slimectl.stages.failed_attempts import FailureCount
from slimectl.stages.score import Grader
from slimectl.stages.score import score as score_stage
from slimectl.types import Metrics, Prompt, Sample, StepReport, TableRow

if TYPE_CHECKING:  # imports torch, which scoring does not need
    from slimectl.runtime.model_functions import Sampler
    from slimectl.stages.evaluate import HeldOutDataset

MAKE_SAMPLES = "sample prompts with slimectl.rollout, or read a file with slimectl.data.jsonl.read_samples"

QUIET: dict[str, Any] = {"track.with": [], "track.plot": False}
"""Defaults of this interface that differ from the commands. Nothing is printed."""


def load_settings(
    recipe: str | PathLike[str] | None = None,
    values: Mapping[str, Any] | None = None,
    *,
    files: Sequence[str | PathLike[str]] = (),
) -> Settings:
    """Resolve settings: defaults < recipe < files < environment < `values` (by dotted key).

    >>> load_settings("quickstart", {"run.num_rollout": 20}).run.num_rollout
    20

    `recipe` is a recipe's name or a TOML file. Metrics are not printed unless track.with is set. Raises SettingsError
    with one line for each invalid value.
    """
    layer = None if recipe is None else recipes.find(str(recipe), instead=False, needed=False).layer
    layers = [Layer("default", nested(QUIET)), *([layer] if layer else []), *(from_file(Path(file)) for file in files)]
    return resolve([*layers, from_environment(), Layer("values", nested(values or {}))]).settings


def prompts(settings: Settings, *sources: str, epochs: int | None = 1, shuffle: bool = True) -> Iterator[Prompt]:
    """Read the prompts of rollout.data, or of `sources`, for a number of epochs (None: without end)."""
    names = list(sources or settings.rollout.data)
    demonstrations = settings.algorithm.trains_on == "demonstrations"
    return builders.prompts(settings, names, epochs=epochs, shuffle=shuffle, demonstrations=demonstrations)


def rollout(prompts: Iterable[Prompt], settings: Settings) -> Iterator[Sample]:
    """Sample responses with the model at model.path. Its engine runs until the iterator ends. See `Sampler`."""
    from slimectl.runtime.model_functions import Sampler

    with Sampler(settings) as sampler:
        yield from sampler.rollout(prompts)


def score(
    samples: Iterable[Sample],
    settings: Settings,
    *,
    reward: Callable[..., Any] | None = None,
    reference: LogProbModel | None = None,
    skip: Callable[[Sample, RecordError], None] | None = None,
) -> Iterator[Sample]:
    """Attach a reward to every sample, from [score] or from `reward`, which is a function or a verifier.

    The function may be async. It has the parameters of score.custom_rm_path: a sample under any name, `samples`, or
    fields of one or of many samples by name. A function of many samples gets at most score.batch_size of them, or all
    siblings with score.group_rm. With a `reference`, its log-probabilities are also attached. A sample that cannot be
    graded (no label) goes to `skip`. Raises RecordError without `skip`, or if a sample's temperature differs from the
    reference's.
    """
    samples = of_type(samples, Sample, MAKE_SAMPLES)
    if reference is not None:
        from slimectl.stages.training_batch import require_sampling_temperature

        samples = (require_sampling_temperature(sample, settings) for sample in samples)
    grader = reward if isinstance(reward, Grader | Verifier) else builders.reward(settings, reward)
    with closing(builders.executor(settings, trains=False)) as executor:
        yield from score_stage(
            samples, grader, settings.score, executor=executor, reference=reference,
            temperature=settings.policy_temperature, skip=skip,
        )  # fmt: skip


def train(
    samples: Iterable[Sample] | Iterable[Prompt],
    settings: Settings,
    *,
    save: str | PathLike[str] | None = None,
    force: bool = False,
) -> Iterator[StepReport]:
    """Train the model at model.path on scored samples. Yield a report for every step. See `Trainer`.

    At the end, the weights are written to the directory `save`. `force` replaces a checkpoint there.
    """
    from slimectl.runtime.model_functions import Trainer

    if save is not None:
        refuse_existing(Path(save), force=force)
    with Trainer(settings) as trainer:
        yield from trainer.train(samples)
        if save is not None:
            trainer.save(Path(save), force=force)


def evaluate(settings: Settings, *, sampler: Sampler | None = None) -> Metrics:
    """Sample and grade every dataset of [eval]. Return accuracy, avg@n, pass@k and more by name.

    Without a `sampler`, the model at model.path is evaluated. The metrics are logged to the trackers of [track] at the
    training step of the model. Raises SettingsError without datasets.
    """
    from slimectl.runtime.model_functions import Sampler

    with Evaluation(settings) as evaluation, nullcontext(sampler) if sampler else Sampler(settings) as engine:
        for _ in evaluation.samples(engine):
            pass
    return evaluation.metrics


class Evaluation:
    """An evaluation of all datasets, checked before any model is loaded. `metrics` is filled while samples are read.

    Its trackers run within a `with` block, so that errors in them are also reported before a model is loaded.
    """

    def __init__(self, settings: Settings) -> None:
        if not settings.eval.data:
            raise SettingsError("eval.data: no datasets are given. Add eval.data.NAME = PROMPTS.")
        builders.check_trackers(settings)
        self.metrics: Metrics = {}
        self.failures: dict[str, FailureCount] = {}
        """Failed attempts of each dataset."""
        self._settings = settings
        self._tables: dict[str, list[TableRow]] = {}
        self._trackers: list[Tracker] = []
        self._datasets: dict[str, tuple[HeldOutDataset, Iterator[Prompt]]] = {}
        for name, source in settings.eval.sources.items():
            dataset = builders.dataset(settings, name)
            check_hooks(dataset.settings, "rollout.", "score.")
            self._datasets[name] = dataset, builders.prompts(dataset.settings, [source], shuffle=False)

    def __enter__(self) -> Self:
        self._trackers = builders.evaluation_trackers(self._settings)
        return self

    def __exit__(self, *_: object) -> None:
        for tracker in self._trackers:
            tracker.close()

    def samples(self, sampler: Sampler) -> Iterator[Sample]:
        """Yield the graded samples of every dataset, then log the metrics to the trackers."""
        with closing(builders.LocalExecutor()) as graders:
            for name, (dataset, questions) in self._datasets.items():
                if getattr(sampler.engine, "addresses", None):
                    dataset = builders.dataset(
                        builders.hook_settings(self._settings, sampler.engine, sampler.folder), name
                    )
                summarized = dataset.evaluate(questions, sampler.generator, self.metrics, executor=graders)
                collected = list[Sample]()
                failures = self.failures[name] = FailureCount()
                summarized = tee(summarized, failures.add)
                yield from tee(summarized, collected.append if self._trackers else lambda sample: None)
                self._tables[name] = builders.sample_table(self._trackers, self._settings, name, collected)
        self._track(int(builders.version_of(sampler.folder)))

    def check_failures(self) -> None:
        """Raise SlimectlError if too many attempts of a dataset failed."""
        for name, failures in self.failures.items():
            failures.check(self._datasets[name][0].settings.rollout, f"{name}: {failures.with_cause}")

    def _track(self, step: int) -> None:
        """Log metrics and tables at the training step of the model."""
        for tracker in self._trackers:
            tracker.log(self.metrics | {"eval/step": float(step)}, step=step)
        for name, table in self._tables.items():
            builders.log_samples(self._trackers, self._settings, name, table, step=step)


def run(
    settings: Settings,
    *,
    samples: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    resume: bool = False,
    force: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[StepReport]:
    """Run the loop of rollout, score and train in the folder run.dir/run.name. Yield a report for every step.

    The folder gets metrics, checkpoints and evaluations, as with the command. `resume` continues from its last
    checkpoint, and `force` replaces a run. If `interrupted()` is true, the run saves after the round and ends. Leaving
    the loop ends the run at once, without saving. With files of `samples`, the run trains on them without sampling, as
    `slimectl train --name` does.
    """
    from slimectl.runtime.rounds import RecordedRounds
    from slimectl.runtime.run import TrainingRun
    from slimectl.stages.recorded_rounds import SampleFiles

    rounds = None
    if samples is not None:
        paths = [str(samples)] if isinstance(samples, str | PathLike) else list(map(str, samples))
        settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"data": paths})})
        rounds = RecordedRounds(settings, SampleFiles(paths))
    check_complete(settings.model_dump(by_alias=True))
    job = TrainingRun(settings, interrupted=interrupted, rounds=rounds)
    return job.reports(resume=resume, force=force)
