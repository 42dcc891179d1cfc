"""The folder of a sweep, from which everything about it is read: trials, runs, their states and their scores.

sweeps/NAME/  best.toml
              trial_001/  trial.toml  seed_1/ (a run)  seed_1.log  seed_2/  seed_2.log
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slimectl.data.atomic_replace import storage_errors, write_text
from slimectl.data.locks import Lock, holder_of
from slimectl.data.ownership import LOCK, read_manifest
from slimectl.data.run_settings import RUN_TOML
from slimectl.errors import SettingsError
from slimectl.settings.keys import flat, settings_toml, toml_value
from slimectl.settings.layers import from_file
from slimectl.settings.loading import resolve
from slimectl.sweeps.plan import Plan, Trial
from slimectl.system.stdio import quantity

TRIAL_TOML, BEST_TOML = "trial.toml", "best.toml"
OWN = re.compile(rf"trial_\d{{3,}}|{re.escape(BEST_TOML)}|{re.escape(LOCK)}|\.tmp-.*")
SEED = re.compile(r"seed_(-?\d+)")
FAILED = "sweep: failed: "
"""Begins the last line of the log of a run that failed. The reason follows."""
TAIL_BYTES = 65_536


@dataclass(frozen=True)
class Run:
    """One run of a sweep: a trial with a seed."""

    trial: Trial
    seed: int
    parent: Path

    @property
    def path(self) -> Path:
        return self.parent / f"seed_{self.seed}"

    @property
    def log(self) -> Path:
        return self.parent / f"seed_{self.seed}.log"

    @property
    def has_begun(self) -> bool:
        return (self.path / RUN_TOML).exists()

    @property
    def is_active(self) -> bool:
        """Whether a process may be writing the run."""
        holder = holder_of(self.path / LOCK)
        return holder is not None and holder.is_alive()

    def has_finished(self, rounds: int | None) -> bool:
        """Whether the run has reached its end, as a run of at least this many rounds."""
        if "finished" not in (read_manifest(self.path) or {}):
            return False
        with suppress(OSError, ValueError):
            settings = tomllib.loads((self.path / RUN_TOML).read_text(encoding="utf-8"))
            planned = settings.get("run", {}).get("num_rollout")
            return rounds is None or (isinstance(planned, int) and planned >= rounds)
        return False

    @property
    def failure(self) -> str:
        """Why the run failed, or ""."""
        lines = self.last_lines(self.log)
        return lines[-1].removeprefix(FAILED) if lines and lines[-1].startswith(FAILED) else ""

    def write_line(self, text: str) -> None:
        """Append a line to the log."""
        with storage_errors(self.log), self.log.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    @staticmethod
    def last_lines(path: Path) -> list[str]:
        """Return the last lines of a file, or none if it cannot be read."""
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
        return []

    def values(self, metric: str, rounds: int | None = None) -> list[float]:
        """Return the values of a metric up to a round, oldest first."""
        with suppress(OSError):
            lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            return [value for number, value in _points(lines, metric) if rounds is None or number <= rounds]
        return []

    def newest(self, metric: str) -> tuple[int, float | None]:
        """Return the newest round of a run that may be running, and the newest value of the metric near its end."""
        lines = self.last_lines(self.path / "metrics.jsonl")
        rounds = [number for number, _ in _points(lines, "rollout/step")]
        points = [value for _, value in _points(lines, metric)]
        return max(rounds, default=0), points[-1] if points else None


def _points(lines: list[str], metric: str) -> Iterator[tuple[int, float]]:
    """Yield (round, value) of every line that has the metric. A partial line is skipped."""
    for line in lines:
        if f'"{metric}"' in line:
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                yield int(record["rollout_id"]), float(record["metrics"][metric])


@dataclass(frozen=True)
class Score:
    """The scores of a trial's seeds after the same number of rounds. The spread is their standard deviation."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Sample standard deviation (divisor n - 1), or None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def error(self) -> float:
        """Standard error of the mean. Unknown, and therefore infinite, for one seed."""
        return math.inf if self.spread is None else self.spread / math.sqrt(len(self.values))

    def is_separate(self, second: Score) -> bool:
        """Return whether the means differ by more than both standard errors together."""
        return abs(self.mean - second.mean) > self.error + second.error


class SweepFolder:
    """The folder of a sweep. Trials that exist keep their names, whatever the order of the file."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.plan = path, plan

    def lock(self) -> Lock:
        """Create and lock the folder. Raises SettingsError if another sweep is active there, StorageError."""
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        way_out = "Wait until it ends, stop it, or choose another folder with --dir."
        return Lock(self.path / LOCK, f"{self.path}: another sweep is active there", way_out=way_out).acquire()

    def adopt(self) -> SweepFolder:
        """Return the folder with the trials of the plan under their existing names, and new ones after them.

        Raises SettingsError if the folder holds anything else, or trials that the plan does not have.
        """
        if self.path.exists() and not self.path.is_dir():
            raise SettingsError(f"{self.path}: is not a folder. Choose another one with --dir.")
        children = sorted(self.path.iterdir()) if self.path.is_dir() else []
        if strangers := [child.name for child in children if not OWN.fullmatch(child.name)]:
            raise SettingsError(f"{self.path}: has {strangers[0]!r}, so it is not a sweep. Choose another --dir.")
        existing = [child for child in children if (child / TRIAL_TOML).is_file()]
        planned = {trial.name: dict(flat(trial.settings)) for trial in self.plan.trials}
        names = {self._planned(folder, planned): folder.name for folder in existing}
        used = max((int(folder.name.rpartition("_")[2]) for folder in existing), default=0)
        trials = []
        for trial in self.plan.trials:
            if trial.name not in names:
                used += 1
            trials.append(replace(trial, name=names.get(trial.name, f"trial_{used:03d}")))
        return SweepFolder(self.path, replace(self.plan, trials=trials))

    def _planned(self, folder: Path, planned: Mapping[str, dict[str, Any]]) -> str:
        """Return the name in the plan of the trial in a folder. Raises SettingsError if the plan no longer has it."""
        advice = f"Restore {self.plan.file}, or start another sweep with --dir."
        old = dict(flat(resolve([from_file(folder / TRIAL_TOML)]).settings))
        name = next((name for name, settings in planned.items() if settings == old), None)
        if name is None:
            changes = [
                [
                    f"{name} = {toml_value(new)} (was {toml_value(old.get(name))})"
                    for name, new in settings.items()
                    if new != old.get(name)
                ]
                for settings in planned.values()
            ]
            nearest = min(changes, key=len)
            more = f" and {quantity(len(nearest) - 1, 'more setting')}" if len(nearest) > 1 else ""
            raise SettingsError(
                f"{self.plan.file}: no longer has {folder}. The nearest trial has {nearest[0]}{more}. {advice}"
            )
        for child in folder.iterdir():
            seed = SEED.fullmatch(child.name)
            if seed and int(seed[1]) not in self.plan.sweep.seeds:
                raise SettingsError(f"{self.plan.file}: sweep.seeds no longer has {seed[1]} of {folder}. {advice}")
        return name

    def write_trials(self) -> None:
        """Write the settings of every trial that has none yet, in order."""
        for trial in self.plan.trials:
            path = self.path / trial.name / TRIAL_TOML
            if not path.exists():
                with storage_errors(path.parent):
                    path.parent.mkdir(exist_ok=True)
                write_text(path, f"# {trial} of {self.plan.file}\n{settings_toml(trial.settings)}")

    def run(self, trial: Trial, seed: int) -> Run:
        return Run(trial, seed, self.path / trial.name)

    def runs(self, trial: Trial) -> list[Run]:
        return [self.run(trial, seed) for seed in self.plan.sweep.seeds]

    def score_of(self, run: Run, rounds: int | None) -> float | None:
        """Return the score of a finished run after `rounds`, or None if it has no finite one."""
        values = run.values(self.plan.sweep.metric, rounds)
        if not values:
            return None
        kind, best = self.plan.sweep.score, max if self.plan.higher_is_better else min
        if kind == "mean":
            value = statistics.fmean(values[-self.plan.sweep.window :])
        else:
            value = values[-1] if kind == "last" else best(values)
        return value if math.isfinite(value) else None

    def write_best(self, trial: Trial, note: str) -> Path:
        """Write the settings of the best trial, with the `note` as a comment, unless they are there already."""
        path = self.path / BEST_TOML
        text = f"# {note}\n# {trial} of {self.plan.file}\n{settings_toml(trial.settings)}"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
        return path
