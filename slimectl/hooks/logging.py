"""User functions that change the metrics which trackers log of a round or an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slimectl.hooks.args import FlatSettings
from slimectl.hooks.registry import required_hook
from slimectl.settings import Settings
from slimectl.stages.score import reward_number
from slimectl.types import Metrics, Sample, Status, StepReport
from slimectl.user_code import Hook

ROLLOUT, EVALUATION = "track.custom_rollout_log_function_path", "track.custom_eval_rollout_log_function_path"
OF_SAMPLES = "rollout/"
"""Prefix of the metrics computed from a round's samples."""


def user_rollout_log(report: StepReport, tracked: Metrics, *, settings: Settings) -> Metrics:
    """Return the metrics that trackers log of a report with samples.

    The metrics of the samples are left out if the user's function returns True.
    """
    function = required_hook(settings, ROLLOUT)
    extra = {name: value for name, value in tracked.items() if name.startswith(OF_SAMPLES)}
    base_metrics = {name: value for name, value in tracked.items() if name not in extra}
    arguments = {"rollout_id": report.rollout_id, "samples": report.samples, "rollout_extra_metrics": extra}
    arguments["rollout_time"] = report.timings.get("perf/rollout_time", 0.0)
    return (
        base_metrics
        if _skips_default_log(function, settings, arguments)
        else base_metrics | _check_numbers(function, extra)
    )


def user_eval_log(
    rollout_id: int, samples: Mapping[str, Sequence[Sample]], metrics: Metrics, *, settings: Settings
) -> Metrics:
    """Return the metrics that trackers log of an evaluation; none if the user's function returns True."""
    function = required_hook(settings, EVALUATION)
    data = {
        name: {
            "rewards": [reward_number(sample, settings.score.reward_key) for sample in dataset_samples],
            "truncated": [sample.status is Status.TRUNCATED for sample in dataset_samples],
            "samples": list(dataset_samples),
        }
        for name, dataset_samples in samples.items()
    }
    extra = dict(metrics)
    skips = _skips_default_log(function, settings, {"rollout_id": rollout_id, "data": data, "extra_metrics": extra})
    return {} if skips else _check_numbers(function, extra)


def _skips_default_log(function: Hook, settings: Settings, arguments: Mapping[str, Any]) -> bool:
    args = FlatSettings(settings)
    result = function({"args": args, "settings": args, **arguments})
    if result is not None and not isinstance(result, bool):
        raise function.returned(result, "True to skip the default log, else False")
    return bool(result)


def _check_numbers(function: Hook, metrics: Metrics) -> Metrics:
    """Return the metrics. Raises HookError for names or values that no tracker accepts."""
    for name, value in metrics.items():
        if not isinstance(name, str) or not isinstance(value, int | float) or math.isinf(value):
            raise function.returned(value, f"numbers only: the metric {name!r} is none")
    return metrics
