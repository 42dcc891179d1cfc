"""Settings of `slimectl sweep`: the section [sweep] of its file, and the values that [sweep.settings] lists."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from slimectl.errors import SettingsError
from slimectl.plugins.registry import EXECUTORS
from slimectl.settings.base import PositiveInt, Section, registered_in
from slimectl.settings.keys import suggestion
from slimectl.settings.loading import error_lines

DIGITS = 4
"""Significant digits of a number that is drawn from a range, so that it stays readable."""


class Range(Section):
    """A range to draw numbers from. They are integers if both bounds are."""

    low: int | float
    high: int | float
    log: bool = False

    @model_validator(mode="after")
    def _check_order(self) -> Range:
        if not self.low < self.high:
            raise PydanticCustomError("range", "low must be below high")
        if self.log and self.low <= 0:
            raise PydanticCustomError("range", "low must be above 0 with log = true")
        return self

    def draw(self, chance: float) -> int | float:
        """Return the number at a share of the range, from 0 to 1.

        >>> Range(low=1e-5, high=1e-3, log=True).draw(0.5), Range(low=1, high=8).draw(0.999)
        (0.0001, 8)
        """
        is_whole = isinstance(self.low, int) and isinstance(self.high, int)
        # Half a step beyond both bounds, so that every integer is equally likely.
        low, high = (self.low - 0.5, self.high + 0.5) if is_whole else (self.low, self.high)
        if self.log:
            value = math.exp(math.log(low) + chance * (math.log(high) - math.log(low)))
        else:
            value = low + chance * (high - low)
        number = round(value) if is_whole else float(f"{value:.{DIGITS}g}")
        return min(max(number, self.low), self.high)


Choices = list[Any] | Range


class SweepSettings(Section):
    """Trials of `slimectl sweep`: the settings to try, the seeds, and how trials are compared."""

    section_name: ClassVar[str] = "sweep"

    method: Literal["grid", "random", "halving"] = "grid"
    """grid tries every combination, random draws `trials` of them. halving (successive halving, arXiv:1502.07943) runs
    all trials for a few rounds, continues the best 1/reduction of them with `reduction` times the rounds, and so on."""

    metric: str
    """Metric of metrics.jsonl that ranks the trials, such as eval/held_out_accuracy or rollout/raw_reward."""

    mode: Literal["max", "min"] | None = None
    """Whether a higher or a lower value is better. Default: min for a loss or a share of errors, else max."""

    score: Literal["last", "best", "mean"] = "last"
    """Score of a run: the last or the best value of the metric, or the mean of its last `window` values."""

    window: PositiveInt = 10
    """Number of values for score = "mean"."""

    seeds: Annotated[list[int], Field(min_length=1)] = [1]
    """Seeds of every trial. Each is one run, with run.seed and rollout.seed set to it."""

    trials: PositiveInt | None = None
    """Number of combinations to draw. Default with halving: the whole grid."""

    draw_seed: int = 0
    """Seed of the drawn combinations."""

    reduction: Annotated[int, Field(ge=2)] = 3
    """With halving: one of this many trials continues."""

    min_rounds: PositiveInt | None = None
    """With halving: minimum rounds of a trial. Default: as few as leave one trial for the last rung."""

    executor: Annotated[str, *registered_in(EXECUTORS)] = "local"
    """Where trials run: local (this machine) or ray (a Ray cluster)."""

    ray_address: str | None = None
    """Address of a running Ray cluster: host:port or auto. Default: start a local one."""

    slots: PositiveInt | None = None
    """Runs at the same time. Default: as many as the GPUs allow, or 1 on a machine without GPUs."""

    cpus: PositiveInt = 1
    """CPUs of a run on Ray."""

    gpus: Annotated[float, Field(ge=0)] | None = None
    """GPUs of a run. Below 1, several runs share a GPU. Default: the GPUs of its trainer and engines."""

    settings: dict[str, Choices] = {}
    """Settings to try: a list of values, or a range { low = 1e-6, high = 1e-4, log = true } to draw from."""

    @field_validator("seeds")
    @classmethod
    def _refuse_repeated_seeds(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise PydanticCustomError("seeds", "must be different")
        return seeds

    @property
    def count(self) -> int | None:
        """Number of combinations of the listed values, or None if there is a range."""
        sizes = [len(values) if isinstance(values, list) else None for values in self.settings.values()]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    def draw(self, trial: int, attempt: int) -> dict[str, Any]:
        """Return the values of a random trial. A setting's value does not depend on the other settings."""
        drawn: dict[str, Any] = {}
        for name, choices in self.settings.items():
            chance = random.Random(f"{self.draw_seed}/{trial}/{attempt}/{name}").random()
            drawn[name] = choices.draw(chance) if isinstance(choices, Range) else choices[int(chance * len(choices))]
        return drawn


def read_sweep(values: Mapping[str, Any], place: str) -> SweepSettings:
    """Validate the section [sweep]. `place` names its file. Raises SettingsError with a line for every error."""
    values = dict(values)
    errors = list(_unknown_keys(values, place))
    if "metric" not in values:
        errors.append(f'sweep.metric: is missing ({place}). Name what ranks the trials: metric = "rollout/raw_reward"')
    listed = values.pop("settings", {})
    choices: dict[str, Any] = {}
    if isinstance(listed, dict):
        choices = dict(_dotted(listed))
    else:
        errors.append(f"sweep.settings: must be a table of settings with their values ({place})")
    ranges = {name: value for name, value in choices.items() if isinstance(value, dict)}
    for name, value in choices.items():
        if not isinstance(value, dict) and not (isinstance(value, list) and value):
            errors.append(
                f"sweep.settings: {name}: must be a list of values, or a range {{ low = …, high = … }}, not {value!r}"
                f" ({place})"
            )
    for name, value in ranges.items():
        try:
            choices[name] = Range.model_validate(value)
        except ValidationError as error:
            errors += error_lines(error, {}, (f"sweep.settings: {name}",)).values()
    if errors:
        raise SettingsError("\n".join(errors))
    try:
        sweep = SweepSettings.model_validate({**values, "settings": choices})
    except ValidationError as error:
        raise SettingsError("\n".join(error_lines(error, {}, ("sweep",)).values())) from None
    if conflicts := list(_conflicts(sweep)):
        raise SettingsError("\n".join(f"{line} ({place})" for line in conflicts))
    return sweep


def _unknown_keys(values: Mapping[str, Any], place: str) -> Iterator[str]:
    names = [f"sweep.{name}" for name in SweepSettings.model_fields]
    for key in values:
        if f"sweep.{key}" not in names:
            near = suggestion(f"sweep.{key}", names)
            hint = f"Did you mean {near}?" if near else f"Known keys: {', '.join(SweepSettings.model_fields)}"
            yield f"sweep.{key}: unknown setting ({place}). {hint}"


def _dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of nested tables by dotted key. A table of a range's keys is a value.

    >>> dict(_dotted({"train": {"lr": [1, 2]}, "train.min_lr": {"low": 0, "high": 1}}))
    {'train.lr': [1, 2], 'train.min_lr': {'low': 0, 'high': 1}}
    """
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not ("." in name and value.keys() & Range.model_fields.keys()):
            yield from _dotted(value, f"{name}.")
        else:
            yield name, value


def _conflicts(sweep: SweepSettings) -> Iterator[str]:
    """Yield a line for every contradiction between the keys of [sweep]."""
    ranges = [name for name, choices in sweep.settings.items() if isinstance(choices, Range)]
    for name in ("run.seed", "rollout.seed", "run.name", "run.dir"):
        if name in sweep.settings:
            remedy = "List seeds in sweep.seeds" if name.endswith("seed") else "The sweep names the folders of its runs"
            yield f"sweep.settings: {name}: cannot be swept. {remedy}."
    if sweep.method == "grid" and ranges:
        yield f'sweep.settings: {ranges[0]}: a grid needs a list of values. Give one, or set method = "random".'
    if sweep.method == "grid" and sweep.trials:
        yield 'sweep.trials: a grid tries every combination. Remove it, or set method = "random".'
    if sweep.trials is None and (sweep.method == "random" or (sweep.method == "halving" and ranges)):
        yield "sweep.trials: is missing. Set the number of combinations to draw."
    if sweep.method == "halving" and "run.num_rollout" in sweep.settings:
        yield "sweep.settings: run.num_rollout: halving decides the rounds of its trials. Remove it."
    if sweep.trials and sweep.count is not None and sweep.trials > sweep.count:
        yield f"sweep.trials: {sweep.trials} trials, but only {sweep.count} combinations are listed. Lower it."
    for key in ("reduction", "min_rounds"):
        if key in sweep.model_fields_set and sweep.method != "halving":
            yield f'sweep.{key}: has no effect with method = "{sweep.method}". Remove it, or set method = "halving".'
    if "window" in sweep.model_fields_set and sweep.score != "mean":
        yield f'sweep.window: has no effect with score = "{sweep.score}". Remove it, or set score = "mean".'
    if sweep.ray_address and sweep.executor != "ray":
        yield 'sweep.ray_address: has no effect with executor = "local". Set executor = "ray".'
