"""Benchmark tasks of `slimectl bench`: frozen settings with a target of held-out accuracy."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slimectl.errors import SettingsError
from slimectl.settings import Settings
from slimectl.settings.layers import Layer, from_file, nested
from slimectl.settings.loading import resolve
from slimectl.types import Prompt

TABLE = "benchmark"
"""Table in a task's file with the target. The other tables are settings."""
FOLDER = Path(__file__).parent / "benchmark_tasks"


class Target(BaseModel):
    """The [benchmark] table: what is measured, with which seeds, and the accuracy to reach."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, pattern=r"^[\w.-]+$")
    version: int = Field(default=1, ge=1)
    """Raised with every change of the file. Figures of different versions are not compared."""
    title: str = ""
    dataset: str
    """Name of the held-out prompts in eval.data."""
    accuracy: float = Field(gt=0, le=1)
    """Fraction of held-out answers that must be correct to reach the target."""
    seeds: list[int] = Field(default=[1, 2, 3], min_length=1)
    threads: int = Field(default=1, ge=1)
    """Number of torch threads."""
    prompts_sha256: str | None = None
    """Digest of the held-out prompts (`digest`). A task whose prompts have changed is rejected."""


@dataclass(frozen=True)
class BenchmarkTask:
    """A target and the settings of the run that works towards it. The environment does not change these settings."""

    target: Target
    layer: Layer

    @property
    def title(self) -> str:
        return f"{self.target.name} {self.target.version}"

    @property
    def metric(self) -> str:
        return f"eval/{self.target.dataset}_accuracy"

    def settings(self, values: Mapping[str, Any] | None = None) -> Settings:
        """Return the settings of a run. `values` by dotted key override the task's own. Raises SettingsError."""
        return resolve([self.layer, Layer("benchmark", nested(values or {}))]).settings


def names() -> list[str]:
    """Return the tasks that ship with slimectl."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def load(name: str) -> BenchmarkTask:
    """Return the task with a name or path. Raises SettingsError, which suggests the nearest name for an unknown one."""
    path = Path(name)
    if path.suffix != ".toml":
        path = FOLDER / f"{name}.toml"
        if not path.exists():
            matches = difflib.get_close_matches(name, names(), n=1)
            hint = f"Did you mean {matches[0]}?" if matches else f"Available: {', '.join(names())}, and TOML files"
            raise SettingsError(f"unknown task {name!r}. {hint}")
    layer = from_file(path)
    table = layer.values.pop(TABLE, None)
    if table is None:
        raise SettingsError(f"{path}: no [{TABLE}] table. A task needs one with name, dataset and accuracy.")
    try:
        task = BenchmarkTask(Target.model_validate(table), layer)
    except ValidationError as error:
        lines = [f"{path}: {TABLE}.{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise SettingsError("\n".join(lines)) from None
    _check(task, path)
    return task


def _check(task: BenchmarkTask, path: Path) -> None:
    """Raise SettingsError for a run whose CPU seconds to the target cannot be measured."""
    settings, dataset = task.settings(), task.target.dataset
    if dataset not in settings.eval.data:
        known = ", ".join(settings.eval.data) or "none"
        raise SettingsError(f"{path}: {TABLE}.dataset: {dataset!r} is not a dataset in eval.data ({known})")
    if settings.run.num_rollout is None:
        raise SettingsError(f"{path}: run.num_rollout is not set. A task gives up after that many rounds.")
    if settings.run.async_level:
        raise SettingsError(f"{path}: run.async_level must be 0, so that no round is sampled during an evaluation.")


def digest(prompts: Iterable[Prompt]) -> str:
    """Return the SHA-256 of prompts and labels, in order."""
    total = hashlib.sha256()
    for prompt in prompts:
        total.update(json.dumps([prompt.text, prompt.label], default=str).encode() + b"\n")
    return total.hexdigest()
