"""The same quantities under ROLL's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slimectl.metrics import ROLL_NAMES
from slimectl.ports import Tracker
from slimectl.types import Metrics, TableRow

EXTREMES = {"score/mean": "", "score/max": "_max_reward", "score/min": "_min_reward"}
"""Of an evaluation, ROLL's part of a name, and what stands behind the dataset's in ours."""


def roll_named(metrics: Mapping[str, float], *, prompts_per_round: int) -> Metrics:
    """The metrics that ROLL knows, under its names, and the axes (…/step), which stay."""
    found = {name: value for name, value in metrics.items() if name.endswith("/step")}
    found |= {ROLL_NAMES[name]: value for name, value in metrics.items() if name in ROLL_NAMES}
    if "train/ppo_kl" in metrics:
        found["actor/policykl"] = -metrics["train/ppo_kl"]  # ROLL's grows with the probability of what was sampled
    if "train/ratio_high_clipfrac" in metrics:
        sides = (metrics[f"train/ratio_{side}_clipfrac"] for side in ("high", "low"))
        found["actor/ppo_ratio_clipfrac"] = sum(sides)
    if "rollout/step" in metrics:
        found["system/samples"] = metrics["rollout/step"] * prompts_per_round
    return found | _validation(metrics)


def _validation(metrics: Mapping[str, float]) -> Metrics:
    """Scores of each dataset, and of all their answers together."""
    counts = {
        name.removeprefix("eval/").removesuffix("_samples"): value
        for name, value in metrics.items()
        if name.startswith("eval/") and name.endswith("_samples")
    }
    found = {
        f"val/{name}/{theirs}": metrics[f"eval/{name}{ours}"] for name in counts for theirs, ours in EXTREMES.items()
    }
    if counts:
        total = sum(found[f"val/{name}/score/mean"] * count for name, count in counts.items())
        found["val/score/mean"] = total / sum(counts.values())
        found["val/score/max"] = max(found[f"val/{name}/score/max"] for name in counts)
        found["val/score/min"] = min(found[f"val/{name}/score/min"] for name in counts)
    return found


class Renamed:
    """A tracker that gets ROLL's names, or those besides slime's (`both`)."""

    def __init__(self, tracker: Tracker, *, both: bool, prompts_per_round: int) -> None:
        self.tracker = tracker
        self._both = both
        self._prompts_per_round = prompts_per_round

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        roll = roll_named(metrics, prompts_per_round=self._prompts_per_round)
        self.tracker.log({**metrics, **roll} if self._both else roll, step=step)

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        self.tracker.table(name, rows, step=step)

    def close(self) -> None:
        self.tracker.close()
