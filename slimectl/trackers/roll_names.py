"""Metrics under ROLL's names."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from slimectl.data.metrics_catalogue import MOVES, PHASES, ROLL_NAMES
from slimectl.protocols import Tracker
from slimectl.trackers.base import WrappedTracker
from slimectl.types import Metrics

EXTREMES = {"score/mean": "", "score/max": "_max_reward", "score/min": "_min_reward"}
"""ROLL's suffix of an evaluation metric, and the suffix after the dataset's name in slimectl's."""


RATED_ROUNDS = 5
"""Number of rounds over which ROLL computes the token rate."""


def roll_named(metrics: Mapping[str, float], *, prompts_per_round: int) -> Metrics:
    """Return ROLL's metrics under its names. The axes (…/step) and the memory of phases already have them."""
    renamed = {name: value for name, value in metrics.items() if name.endswith("/step") or name.startswith("memory/")}
    renamed |= {ROLL_NAMES[name]: value for name, value in metrics.items() if name in ROLL_NAMES}
    for part in ("", "/std", "/max", "/min"):
        if (value := metrics.get(f"rollout/penalized_rewards{part}")) is not None:
            renamed[ROLL_NAMES[f"rollout/rewards{part}"]] = value
    if "train/ppo_kl" in metrics:
        # ROLL uses the opposite sign: its value grows with the probability of the sampled tokens.
        renamed["actor/policykl"] = -metrics["train/ppo_kl"]
    if "train/pg_loss" in metrics:
        renamed["actor/weighted_pg_loss"] = metrics["train/pg_loss"]
    if "train/ratio_high_clipfrac" in metrics:
        sides = (metrics[f"train/ratio_{side}_clipfrac"] for side in ("high", "low"))
        renamed["actor/ppo_ratio_clipfrac"] = sum(sides)
    if "rollout/step" in metrics:
        renamed["system/samples"] = metrics["rollout/step"] * prompts_per_round
    return renamed | _phases(metrics) | _validation(metrics)


SUMS = {
    "time/ref_log_probs_values_reward": ("perf/ref_log_probs_time", "perf/teacher_log_probs_time"),
    "time/old_log_probs_values": ("perf/log_probs_time", "perf/values_time"),
}
"""ROLL's times of the passes before the steps, with the metrics that they sum."""


def _phases(metrics: Mapping[str, float]) -> Metrics:
    """Return times of the phases of a round, in total and in parts, and of the passes before its steps."""
    renamed: Metrics = {}
    for name, passes in SUMS.items():
        if any(one_pass in metrics for one_pass in passes):
            renamed[name] = sum(metrics.get(one_pass, 0.0) for one_pass in passes)
    for phase, names in PHASES.items():
        if any(name in metrics for name in names):
            parts = {"execute": sum(metrics.get(name, 0.0) for name in names)}
            for move, metric_by_phase in MOVES.items():
                parts[move] = metrics.get(metric_by_phase.get(phase, ""), 0.0)
            parts["total"] = sum(parts.values())
            renamed |= {f"time/{phase}/{part}": seconds for part, seconds in parts.items()}
    return renamed


def _validation(metrics: Mapping[str, float]) -> Metrics:
    """Return evaluation scores of each dataset, and of all datasets together."""
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


class Renamed(WrappedTracker):
    """A tracker that receives ROLL's names, and with `keep_slime_names` also slime's.

    system/tps is the token rate of the last `RATED_ROUNDS` rounds.
    """

    def __init__(self, tracker: Tracker, *, keep_slime_names: bool, prompts_per_round: int) -> None:
        super().__init__(tracker)
        self._keep_slime_names = keep_slime_names
        self._prompts_per_round = prompts_per_round
        self._rounds: deque[tuple[float, float]] = deque(maxlen=RATED_ROUNDS)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        roll = roll_named(metrics, prompts_per_round=self._prompts_per_round)
        if "perf/tokens_per_sec" in metrics:
            self._rounds.append((metrics["perf/tokens_per_sec"], metrics["perf/total_time"]))
            tokens = sum(rate * seconds for rate, seconds in self._rounds)
            roll["system/tps"] = tokens / sum(seconds for _, seconds in self._rounds)
        self.tracker.log({**metrics, **roll} if self._keep_slime_names else roll, step=step)
