"""Stages and runs from settings: iterables in, iterators out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

from slimectl import builders, recipes
from slimectl.api.models import Sampler, Trainer
from slimectl.data.atomic_replace import refuse_existing
from slimectl.errors import RecordError, SettingsError
from slimectl.hooks import check_hooks
from slimectl.hooks.user_hooks import UserHooks
from slimectl.protocols import Agent, LogProbModel, RewardFn
from slimectl.runtime.run import TrainingRun
from slimectl.settings import Settings
from slimectl.settings.loading import Layer, from_environment, from_file, nested, resolve, settings_toml
from slimectl.settings.secret import check_complete
from slimectl.stages.evaluate import answer_extractor, resolve_dataset_settings, with_summary
from slimectl.stages.evaluate import evaluate as evaluate_stage
from slimectl.stages.score import score as score_stage
from slimectl.types import Metrics, Prompt, Sample, StepReport

QUIET: dict[str, Any] = {"track.with": [], "track.plot": False}
"""Defaults of this interface that differ from the commands': nothing is printed."""


def load_settings(
    recipe: str | PathLike[str] | None = None,
    values: Mapping[str, Any] | None = None,
    *,
    files: Sequence[str | PathLike[str]] = (),
) -> Settings:
    """Resolve settings: defaults < recipe < files < environment < `values`, which has dotted keys.

    >>> load_settings("quickstart", {"run.num_rollout": 20}).run.num_rollout
    20

    `recipe` is a recipe's name or a TOML file. Metrics are not printed unless track.with says so. Raises SettingsError,
    with one line for each wrong value.
    """
    layer = None if recipe is None else recipes.find(str(recipe), instead=False, needed=False).layer
    layers = [Layer("default", nested(QUIET)), *([layer] if layer else []), *(from_file(Path(file)) for file in files)]
    return resolve([*layers, from_environment(), Layer("values", nested(values or {}))]).settings


def prompts(settings: Settings, *sources: str, epochs: int | None = 1, shuffle: bool = True) -> Iterator[Prompt]:
    """Read the prompts of rollout.data, or of `sources`, for a number of epochs (None: without end)."""
    names = list(sources or settings.rollout.data)
    return builders.prompts(settings, names, epochs=epochs, shuffle=shuffle)


def rollout(prompts: Iterable[Prompt], settings: Settings) -> Iterator[Sample]:
    """Sample answers with the model at model.path, whose engine is up until the iterator ends. See `Sampler`."""
    with Sampler(settings) as sampler:
        yield from sampler.rollout(prompts)


def score(
    samples: Iterable[Sample],
    settings: Settings,
    *,
    reward: RewardFn | None = None,
    reference: LogProbModel | None = None,
    skip: Callable[[Sample, RecordError], None] | None = None,
) -> Iterator[Sample]:
    """Attach a reward to every sample: what [score] names, or `reward`, a function of one sample.

    A `reference` also attaches its log-probabilities. A sample that cannot be graded (no label) goes to `skip`; without
    one, RecordError is raised.
    """
    grader = builders.reward(settings) if reward is None else reward
    with closing(builders.executor(settings, trains=False)) as executor:
        yield from score_stage(samples, grader, settings.score, executor=executor, reference=reference, skip=skip)


def train(
    samples: Iterable[Sample] | Iterable[Prompt],
    settings: Settings,
    *,
    save: str | PathLike[str] | None = None,
    force: bool = False,
) -> Iterator[StepReport]:
    """Train the model at model.path on scored samples; yield a report for every step. See `Trainer`.

    At the end the weights are written to the directory `save`; `force` replaces a checkpoint there.
    """
    if save is not None:
        refuse_existing(Path(save), force=force)
    with Trainer(settings) as trainer:
        yield from trainer.train(samples)
        if save is not None:
            trainer.save(Path(save), force=force)


def evaluate(settings: Settings, *, sampler: Sampler | None = None) -> Metrics:
    """Sample and grade every dataset of [eval]; return accuracy, avg@n, pass@k and more by name.

    Without a `sampler` the model at model.path is measured. Raises SettingsError without datasets.
    """
    evaluation = Evaluation(settings)
    with Sampler(settings) if sampler is None else nullcontext(sampler) as engine:
        for _ in evaluation.samples(engine):
            pass
    return evaluation.metrics


class Evaluation:
    """An evaluation of all datasets, checked before any model is loaded; `metrics` is filled as samples are read."""

    def __init__(self, settings: Settings) -> None:
        if not settings.eval.data:
            raise SettingsError("eval.data: no datasets are given; add eval.data.NAME = PROMPTS")
        self.metrics: Metrics = {}
        self._datasets: dict[str, tuple[Settings, Iterator[Prompt], RewardFn, Agent | None]] = {}
        for name, source in settings.eval.sources.items():
            own = resolve_dataset_settings(settings, name)
            check_hooks(own, "rollout.", "score.")
            questions = builders.prompts(own, [source], shuffle=False)
            self._datasets[name] = own, questions, builders.reward(own), builders.agent(own)

    def samples(self, sampler: Sampler) -> Iterator[Sample]:
        """Yield the graded samples of every dataset."""
        with closing(builders.graders()) as graders:
            for name, (settings, questions, reward, agent) in self._datasets.items():
                too_long: list[Prompt] = []
                graded = evaluate_stage(
                    questions,
                    sampler.engine,
                    sampler.tokenizer,
                    reward,
                    settings,
                    executor=graders,
                    agent=agent,
                    left_out=too_long.append,
                    hooks=UserHooks(settings),
                )
                answer = answer_extractor(reward)
                yield from with_summary(name, graded, self.metrics, settings, answer=answer, too_long=too_long)


def run(
    settings: Settings,
    *,
    resume: bool = False,
    force: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[StepReport]:
    """Run the loop of rollout, score and train in the folder run.dir/run.name; yield a report for every step.

    The folder has metrics, checkpoints and evaluations, as of the command. `resume` goes on from its last checkpoint,
    `force` replaces a run. When `interrupted()` is true, the run is saved after the round and ends; a caller that
    leaves the loop ends it at once, without saving.
    """
    check_complete(settings.model_dump(by_alias=True))
    return TrainingRun(settings, interrupted=interrupted).reports(settings_toml(settings), resume=resume, force=force)
