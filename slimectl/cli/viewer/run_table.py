"""Runs as a view shows them: state, latest values and findings of each, and groups that differ only in their seeds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from slimectl.cli.viewer.library import RunSource
from slimectl.diagnosis import diagnose_run
from slimectl.errors import SettingsError

SEED = re.compile(r"(.+\.)?seed")
UNRELATED = re.compile(r"run\.(name|dir)|(sglang|vllm)\.python|track\..+")
"""Settings for the folder, machine and trackers of a run, which do not change its training."""
SEPARATORS = re.compile(r"[-_.=/ ]*(?:s|seed)?[-_.=/ ]*$")
"""The end of the common part of run names, such as the `-s` of grpo-s1 and grpo-s2."""


def summary(run: RunSource) -> dict[str, Any]:
    """Return the state of a run, its rounds, and the latest values of its reward, loss and evaluations.

    `best` has the highest accuracy of each evaluation with the round after which it was measured.
    """
    last: dict[str, float] = {}
    best: dict[str, tuple[float, int | None]] = {}
    rounds = 0
    for line in run.all_metrics():
        last |= line["metrics"]
        rounds = max(rounds, int(line["metrics"].get("rollout/step", 0)))
        for name, value in line["metrics"].items():
            if name.endswith("_accuracy") and (name not in best or value > best[name][0]):
                best[name] = value, line.get("rollout_id")
    metrics = run.path / "metrics.jsonl"
    return {
        "run": str(run.path),
        "state": run.state,
        "rounds": rounds,
        "planned": run.settings.get("run.num_rollout"),
        "reward": last.get("rollout/raw_reward"),
        "loss": last.get("train/loss"),
        "evaluations": {name: value for name, value in last.items() if name.endswith("_accuracy")},
        "best": best,
        "changed": (metrics if metrics.exists() else run.path).stat().st_mtime,
    }


def findings(path: Path) -> list[dict[str, Any]]:
    """Return the findings of `slimectl diagnose` as JSON, or none if the run's settings cannot be read."""
    with suppress(SettingsError):
        return [finding.to_json() for finding in diagnose_run(path)]
    return []


def settings_columns(run: RunSource) -> dict[str, Any]:
    """Return the settings of a run that the table shows."""
    settings = run.settings
    return {
        "algorithm": settings.get("algorithm.name"),
        "model": settings.get("model.path") or settings.get("model.card"),
        "lr": settings.get("train.lr"),
        "seeds": {name: value for name, value in settings.items() if SEED.fullmatch(name)},
    }


def seed_groups(runs: Iterable[RunSource]) -> list[dict[str, Any]]:
    """Return the groups of two or more runs whose settings differ only in seeds, each with a name."""
    groups: defaultdict[str, list[RunSource]] = defaultdict(list)
    for run in runs:
        settings = {
            name: value
            for name, value in run.settings.items()
            if not SEED.fullmatch(name) and not UNRELATED.fullmatch(name)
        }
        groups[repr(sorted(settings.items()))].append(run)
    return [
        {"name": _group_name([run.name for run in members]), "runs": [run.id for run in members]}
        for members in groups.values()
        if len(members) > 1 and members[0].settings
    ]


def _group_name(names: list[str]) -> str:
    """Return the common prefix of the names of runs, or the first name if there is none."""
    first, last = min(names), max(names)
    length = next((at for at, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), len(first))
    return SEPARATORS.sub("", first[:length]) or names[0]
