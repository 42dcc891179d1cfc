"""A user's functions for what trackers get of a round's samples, and of an evaluation's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slimectl.hooks import Args, Hook, hook
from slimectl.settings import Settings
from slimectl.stages.score import reward_number
from slimectl.types import Metrics, Sample, Status, StepReport

ROLLOUT, EVALUATION = "track.custom_rollout_log_function_path", "track.custom_eval_rollout_log_function_path"
OF_SAMPLES = "rollout/"
"""How the metrics begin that are made of a round's samples."""


def own_rollout_log(report: StepReport, tracked: Metrics, settings: Settings) -> Metrics:
    """What trackers get of a report with samples; without those of its samples where the function says so."""
    found = hook(settings, ROLLOUT)
    if found is None:
        return tracked
    extra = {name: value for name, value in tracked.items() if name.startswith(OF_SAMPLES)}
    rest = {name: value for name, value in tracked.items() if name not in extra}
    offered = {"rollout_id": report.rollout_id, "samples": report.samples, "rollout_extra_metrics": extra}
    offered["rollout_time"] = report.perf.get("perf/rollout_time", 0.0)
    return rest if _skips(found, settings, offered) else rest | _numbers(found, extra)


def own_eval_log(
    rollout_id: int, samples: Mapping[str, Sequence[Sample]], metrics: Metrics, settings: Settings
) -> Metrics:
    """What trackers get of an evaluation; nothing where the function says so."""
    found = hook(settings, EVALUATION)
    if found is None:
        return metrics
    data = {
        name: {
            "rewards": [reward_number(sample, settings.score.reward_key) for sample in seen],
            "truncated": [sample.status is Status.TRUNCATED for sample in seen],
            "samples": list(seen),
        }
        for name, seen in samples.items()
    }
    extra = dict(metrics)
    skips = _skips(found, settings, {"rollout_id": rollout_id, "data": data, "extra_metrics": extra})
    return {} if skips else _numbers(found, extra)


def _skips(found: Hook, settings: Settings, offered: Mapping[str, Any]) -> bool:
    args = Args(settings)
    made = found({"args": args, "settings": args, **offered})
    if made is not None and not isinstance(made, bool):
        raise found.returned(made, "True to skip the default log, else False")
    return bool(made)


def _numbers(found: Hook, metrics: Metrics) -> Metrics:
    """Raises HookError for what a function has written that no tracker can take."""
    for name, value in metrics.items():
        if not isinstance(name, str) or not isinstance(value, int | float) or math.isinf(value):
            raise found.returned(value, f"numbers only: the metric {name!r} is none")
    return metrics
