"""Reads the file of a sweep into its trials, each with validated settings, before any of them runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimectl import recipes
from slimectl.data.metrics_catalogue import CATALOGUE, is_evaluation_metric, known
from slimectl.errors import SettingsError
from slimectl.runtime import builders
from slimectl.settings import Layer, Settings
from slimectl.settings.keys import flat, suggestion, toml_value
from slimectl.settings.layers import (
    from_document,
    from_environment,
    from_file,
    nested,
    read_assignments,
    settings_document,
)
from slimectl.settings.loading import examine
from slimectl.settings.run import OWN_TRACKERS
from slimectl.settings.sweep import SweepSettings, read_sweep
from slimectl.stages.best import LOWER_IS_BETTER
from slimectl.system.redaction import is_secret_name, secrets_in

MAX_TRIALS = 10_000
MAX_ATTEMPTS = 1000
"""Draws of a random trial before the combinations that are left count as too few."""


@dataclass(frozen=True, eq=False)
class Trial:
    """One combination of the swept settings. `name` is its folder, such as trial_003."""

    name: str
    values: dict[str, Any]
    settings: Settings

    @property
    def assignment(self) -> str:
        return ", ".join(f"{name} = {toml_value(value)}" for name, value in self.values.items())

    def __str__(self) -> str:
        return f"{self.name} ({self.assignment})" if self.values else self.name


@dataclass(frozen=True)
class Rung:
    """A step of successive halving: the trials that take part, and the rounds after which they are compared."""

    trials: int
    rounds: int | None


@dataclass(frozen=True)
class Plan:
    """A sweep: its options and all trials. `variables` are the environment variables that the settings contain."""

    file: Path
    sweep: SweepSettings
    trials: list[Trial]
    variables: frozenset[str] = frozenset()

    @property
    def higher_is_better(self) -> bool:
        return (self.sweep.mode or default_mode(self.sweep.metric)) == "max"

    @property
    def rungs(self) -> list[Rung]:
        """The rungs of successive halving, or one for all trials.

        With n trials, rounds R and reduction e, rung k of K has n/e^k trials and R/e^(K-k) rounds (algorithm 1 of
        Jamieson and Talwalkar, arXiv:1502.07943, with equal budgets as in Hyperband, arXiv:1603.06560).
        """
        rounds = self.trials[0].settings.run.num_rollout
        if self.sweep.method != "halving" or rounds is None:
            return [Rung(len(self.trials), rounds)]
        factor, count, last = self.sweep.reduction, len(self.trials), 0
        while count // factor ** (last + 1) and rounds >= (self.sweep.min_rounds or 1) * factor ** (last + 1):
            last += 1
        return [Rung(count // factor**k, -(-rounds // factor ** (last - k))) for k in range(last + 1)]


def default_mode(metric: str) -> str:
    return "min" if metric.endswith(LOWER_IS_BETTER) else "max"


def read_plan(file: Path, assignments: Sequence[str] = ()) -> Plan:
    """Read the file of a sweep. `assignments` (-s) override its settings, and its [sweep] as `sweep.KEY=VALUE`.

    Raises SettingsError with a line for every error of [sweep] and of every trial.
    """
    base, options, variables = _layers(file, assignments)
    sweep = read_sweep(options, str(file))
    for overriding in base[-2:]:  # environment and command line
        if name := next((name for name in sweep.settings if is_set(overriding, name)), None):
            raise SettingsError(f"{name}: is set in [sweep.settings] and by the {overriding.origin}. Set only one.")
    layer = f"{file}: [sweep.settings]"
    trials, errors = [], dict[str, list[Trial]]()
    for number, values in enumerate(_combinations(sweep), 1):
        resolved, lines = examine([*base, Layer(layer, nested(values))])
        trials.append(Trial(f"trial_{number:03d}", values, resolved.settings))
        for line in "\n".join(lines).splitlines():
            errors.setdefault(line, []).append(trials[-1])
    if errors:
        raise SettingsError("\n".join(_error_lines(errors, len(trials))))
    first_trials: dict[str, Trial] = {}
    for trial in trials:
        if (first := first_trials.setdefault(repr([*flat(trial.settings)]), trial)) is not trial:
            raise SettingsError(f"{file}: {first} and {trial} have the same settings. Remove one of the values.")
    plan = Plan(file, sweep, trials, variables)
    if conflicts := [*_conflicts(plan, base)]:
        raise SettingsError("\n".join(conflicts))
    return plan


def is_set(layer: Layer, name: str) -> bool:
    """Return whether a layer sets a dotted key."""
    section, _, key = name.partition(".")
    return key.partition(".")[0] in layer.values.get(section, {})


def _layers(file: Path, assignments: Sequence[str]) -> tuple[list[Layer], dict[str, Any], frozenset[str]]:
    """Return the layers below the trials, the values of [sweep], and the environment variables with settings."""
    document = settings_document(file)
    parents, recipe = document.pop("config", []), document.get("recipe")
    if "sweep" not in document:
        raise SettingsError(f'{file}: has no section [sweep]. Add one with at least metric = "rollout/raw_reward"')
    parents = [file.parent / str(name) for name in (parents if isinstance(parents, list) else [parents])]
    is_named = isinstance(recipe, str)
    sections = from_document(
        file, {key: value for key, value in document.items() if not (is_named and key == "recipe")}
    )
    has_settings = bool(parents) or bool(sections.values.keys() - {"sweep"})
    base = recipes.find(recipe if isinstance(recipe, str) else None, instead=has_settings, needed=not has_settings)
    assigned, problems = read_assignments(assignments)
    if problems:
        raise SettingsError("\n".join(problems))
    environment = from_environment()
    layers = [*([base.layer] if base.layer else []), *map(from_file, parents), sections, environment, assigned]
    options: dict[str, Any] = {}
    for layer in layers:
        options |= layer.values.pop("sweep", {})
    variables = {name for key, name in environment.variables.items() if not is_secret_name(key.rpartition(".")[2])}
    return layers, options, frozenset(variables)


def _combinations(sweep: SweepSettings) -> Iterator[dict[str, Any]]:
    """Yield the values of every trial: the grid, the last setting fastest, or distinct random draws."""
    count = sweep.trials or sweep.count or 1
    if count > MAX_TRIALS:
        raise SettingsError(
            f'sweep: {count:,} trials are more than {MAX_TRIALS:,}. Draw some with method = "random" and trials = 50.'
        )
    if sweep.trials is None:
        names = list(sweep.settings)
        lists = [choices for choices in sweep.settings.values() if isinstance(choices, list)]
        yield from (dict(zip(names, values, strict=True)) for values in itertools.product(*lists))
        return
    earlier: set[str] = set()
    for trial in range(sweep.trials):
        for attempt in range(MAX_ATTEMPTS):
            values = sweep.draw(trial, attempt)
            if repr(values) not in earlier:
                break
        else:
            raise SettingsError(f"sweep.trials: found only {len(earlier)} different combinations. Lower it to that.")
        earlier.add(repr(values))
        yield values


def _error_lines(errors: dict[str, list[Trial]], count: int) -> Iterator[str]:
    """Yield each error once, with the first trial that has it unless all have it."""
    for line, trials in errors.items():
        yield line if len(trials) == count else f"{trials[0]}: {line}"


def _conflicts(plan: Plan, base: list[Layer]) -> Iterator[str]:
    """Yield a line for everything in the trials that a sweep cannot run or compare."""
    sweep, first = plan.sweep, plan.trials[0].settings
    place = f"({plan.file})"
    if sweep.method == "halving" and not first.run.num_rollout:
        yield f"sweep.method: halving needs the rounds of a whole run. Set run.num_rollout. {place}"
    if len(plan.rungs) == 1 and sweep.method == "halving" and first.run.num_rollout:
        yield (
            f"sweep.method: halving has nothing to reduce: {len(plan.trials)} trials of {first.run.num_rollout} rounds"
            f" with reduction = {sweep.reduction}. Add trials or rounds, or lower sweep.min_rounds. {place}"
        )
    elif len(plan.rungs) > 1:
        rounds = Layer("the first rung", {"run": {"num_rollout": plan.rungs[0].rounds}})
        yield from examine([*base, Layer("trial", nested(plan.trials[0].values)), rounds])[1]
    for trial in plan.trials:
        if line := metric_error(sweep.metric, trial.settings):
            yield f"{line} {place}" if len(plan.trials) == 1 else f"{trial}: {line} {place}"
            break
    if next(secrets_in(first.model_dump(by_alias=True)), None) is not None:
        yield f"{plan.file}: a setting is a secret, and trials write their settings to files. Use env:NAME or file:PATH"
    if first.track.prometheus_port:
        yield "track.prometheus_port: trials would share the port. Set it to 0 for a free one."


def metric_error(metric: str, settings: Settings) -> str:
    """Return why a run with these settings does not record the metric, or "" if it may.

    A metric with an unknown first part may come from a function of the user.
    """
    part, _, name = metric.partition("/")
    datasets = list(settings.eval.data)
    if part == "eval" and not is_evaluation_metric(name, datasets):
        options = [f"eval/{dataset}{end}" for dataset in datasets for end in ("_accuracy", "_avg_reward", "/loss")]
        near = suggestion(metric, options) if options else None
        hint = f"Did you mean {near}?" if near else f"Datasets of [eval]: {', '.join(datasets) or 'none'}."
        return f"sweep.metric: {metric}: is not a metric of an evaluation. {hint}"
    if part in ("perf", "memory"):
        return f"sweep.metric: {metric}: is in perf.jsonl and differs from run to run. Choose one of metrics.jsonl."
    if known(metric) or part not in {entry.name.partition("/")[0] for entry in CATALOGUE}:
        return ""
    near = suggestion(metric, [entry.name for entry in CATALOGUE])
    hint = f"Did you mean {near}?" if near else "`slimectl metrics` lists all."
    return f"sweep.metric: {metric}: unknown metric. {hint}"


def run_options(plan: Plan, trial: Trial, rounds: int | None) -> list[str]:
    """Return the options of `slimectl run` for a trial that ends after `rounds`.

    A learning rate that follows the length of the run keeps the schedule of the whole run.
    """
    options = []
    settings = trial.settings
    if plan.sweep.method == "halving":
        options.append(f"run.num_rollout={rounds}")
        if settings.train.needs_total_steps:
            options.append(f"train.lr_decay_iters={builders.total_steps(settings)}")
    if set(settings.track.with_) - {*OWN_TRACKERS} and settings.track.group is None:
        options.append(f"track.group={plan.file.stem}/{trial.name}")
    return [word for option in options for word in ("-s", option)]
