"""Metrics under ROLL's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slimectl.data.metrics_catalogue import ROLL_NAMES
from slimectl.protocols import Tracker
from slimectl.types import Metrics, TableRow

EXTREMES = {"score/mean": "", "score/max": "_max_reward", "score/min": "_min_reward"}
"""ROLL's suffix of an evaluation metric, and the suffix after the dataset's name in slimectl's."""


def roll_named(metrics: Mapping[str, float], *, prompts_per_round: int) -> Metrics:
    """Metrics that ROLL has, under its names, and the axes (…/step) unchanged."""
    renamed = {name: value for name, value in metrics.items() if name.endswith("/step")}
    renamed |= {ROLL_NAMES[name]: value for name, value in metrics.items() if name in ROLL_NAMES}
    if "train/ppo_kl" in metrics:
        renamed["actor/policykl"] = -metrics[
            "train/ppo_kl"
        ]  # ROLL's sign: it grows with the probability of the sampled tokens
    if "train/ratio_high_clipfrac" in metrics:
        sides = (metrics[f"train/ratio_{side}_clipfrac"] for side in ("high", "low"))
        renamed["actor/ppo_ratio_clipfrac"] = sum(sides)
    if "rollout/step" in metrics:
        renamed["system/samples"] = metrics["rollout/step"] * prompts_per_round
    return renamed | _validation(metrics)


def _validation(metrics: Mapping[str, float]) -> Metrics:
    """Evaluation scores of each dataset, and of all datasets together."""
    counts = {
        name.removeprefix("eval/").removesuffix("_samples"): value
        for name, value in metrics.items()
        if name.startswith("eval/") and name.endswith("_samples")
    }
    renamed = {
        f"val/{name}/{theirs}": metrics[f"eval/{name}{ours}"] for name in counts for theirs, ours in EXTREMES.items()
    }
    if counts:
        total = sum(renamed[f"val/{name}/score/mean"] * count for name, count in counts.items())
        renamed["val/score/mean"] = total / sum(counts.values())
        renamed["val/score/max"] = max(renamed[f"val/{name}/score/max"] for name in counts)
        renamed["val/score/min"] = min(renamed[f"val/{name}/score/min"] for name in counts)
    return renamed


class Renamed:
    """A tracker that gets ROLL's names, in addition to slime's with `keep_slime_names`."""

    def __init__(self, tracker: Tracker, *, keep_slime_names: bool, prompts_per_round: int) -> None:
        self.tracker = tracker
        self._keep_slime_names = keep_slime_names
        self._prompts_per_round = prompts_per_round

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        roll = roll_named(metrics, prompts_per_round=self._prompts_per_round)
        self.tracker.log({**metrics, **roll} if self._keep_slime_names else roll, step=step)

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        self.tracker.table(name, rows, step=step)

    def close(self) -> None:
        self.tracker.close()
