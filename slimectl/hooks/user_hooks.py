"""The hooks that the settings give by path, as the object that stages call."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from slimectl.data.json_values import plain_number, plain_value
from slimectl.hooks import rollout, training_batch
from slimectl.hooks.args import FlatSettings
from slimectl.hooks.logged_metrics import collected_metrics
from slimectl.hooks.registry import is_set, required_hook
from slimectl.hooks.training_batch import LOSS, REDUCER, TIS
from slimectl.migrate.slime_shapes import Arrange, call_with_samples
from slimectl.plugins.callables import Hook
from slimectl.protocols import Policy, PreStepHook
from slimectl.settings import Settings
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.stages.score import reward_number
from slimectl.types import Metrics, Sample, Status, StepReport, TrainingSample

if TYPE_CHECKING:
    from slimectl.algorithms.losses import PolicyLoss

ROLLOUT_LOG, EVAL_LOG = "track.custom_rollout_log_function_path", "track.custom_eval_rollout_log_function_path"
OF_SAMPLES = "rollout/"
"""Prefix of the metrics computed from a round's samples."""
STEP = "megatron.custom_before_train_step_hook_path"


class UserHooks(Hooks):
    """The functions that `settings` give by path. Each is loaded at its first call, or by `check_hooks`."""

    def __init__(self, settings: Settings) -> None:
        def on(setting: str, function: Any, default: Any = None) -> Any:
            return partial(function, settings=settings) if is_set(settings, setting) else default

        super().__init__(
            agent_at=rollout.agent_at(settings),
            on_sample=on(rollout.SAMPLE, rollout.apply_sample_hooks),
            sample_rounds=on(rollout.FUNCTION, rollout.UserRollout),
            keep_group=on(rollout.KEEP, rollout.keep_group),
            take_from_buffer=on(rollout.BUFFER, rollout.take_from_buffer, NO_HOOKS.take_from_buffer),
            on_round=on(rollout.ALL, rollout.process_all, NO_HOOKS.on_round),
            filter_samples=on(training_batch.FILTER, training_batch.apply_sample_filter),
            convert=on(training_batch.CONVERT, training_batch.convert_samples),
            post_process_rewards=on(training_batch.REWARDS, training_batch.post_process_rewards),
            advantages=on(training_batch.ADVANTAGE, training_batch.custom_advantages),
            post_process_rows=on(training_batch.POSTPROCESS, training_batch.postprocess),
            loss=_custom_loss(settings) if is_set(settings, LOSS) else None,
            policy_loss=on(TIS, _policy_loss, on(REDUCER, _policy_loss)),
            before_step=_announce_step if is_set(settings, STEP) else NO_HOOKS.before_step,
            log_rollout=on(ROLLOUT_LOG, user_rollout_log, NO_HOOKS.log_rollout),
            log_eval=on(EVAL_LOG, user_eval_log, NO_HOOKS.log_eval),
        )


def _announce_step(policy: Policy, rollout_id: int, step_id: int) -> None:
    """Announce the step to the policy, which calls the function on its ranks."""
    cast(PreStepHook, policy).before_step(rollout_id, step_id)


# Imported only here, so that commands that only sample start without torch.


def _custom_loss(settings: Settings) -> Any:
    from slimectl.hooks.loss import CustomLoss

    return CustomLoss(settings)


def _policy_loss(
    loss: PolicyLoss, rows: Sequence[TrainingSample], trajectory_ids: Sequence[Hashable], *, settings: Settings
) -> PolicyLoss:
    from slimectl.hooks.loss import user_policy_loss

    return user_policy_loss(loss, rows, trajectory_ids, settings)


def user_rollout_log(report: StepReport, tracked: Metrics, *, settings: Settings) -> Metrics:
    """Return the metrics of a report with samples that go to the trackers.

    The metrics of the samples are left out if the user's function returns True.
    """
    function = required_hook(settings, ROLLOUT_LOG)
    extra: Metrics = {}
    of_samples = {name: value for name, value in tracked.items() if name.startswith(OF_SAMPLES)}
    base_metrics = {name: value for name, value in tracked.items() if name not in of_samples}

    def arguments(arrange: Arrange) -> dict[str, Any]:
        _replace(extra, of_samples)
        return {
            "rollout_id": report.rollout_id,
            "samples": arrange(report.samples),
            "rollout_extra_metrics": extra,
            "rollout_time": report.timings.get("perf/rollout_time", 0.0),
        }

    skips, logged = _called(function, settings, arguments)
    return base_metrics | ({} if skips else _check_numbers(function, extra)) | logged


def user_eval_log(
    rollout_id: int, samples: Mapping[str, Sequence[Sample]], metrics: Metrics, *, settings: Settings
) -> Metrics:
    """Return the metrics of an evaluation that go to the trackers. Empty if the user's function returns True."""
    function = required_hook(settings, EVAL_LOG)
    extra: Metrics = {}

    def arguments(arrange: Arrange) -> dict[str, Any]:
        _replace(extra, metrics)
        data = {
            name: {
                "rewards": [
                    None if sample.has_no_reward else reward_number(sample, settings.score.reward_key)
                    for sample in dataset_samples
                ],
                "truncated": [sample.status is Status.TRUNCATED for sample in dataset_samples],
                "samples": arrange(dataset_samples),
            }
            for name, dataset_samples in samples.items()
        }
        return {"rollout_id": rollout_id, "data": data, "extra_metrics": extra}

    skips, logged = _called(function, settings, arguments)
    return ({} if skips else _check_numbers(function, extra)) | logged


def _replace(metrics: Metrics, values: Metrics) -> None:
    metrics.clear()
    metrics.update(values)


def _called(function: Hook, settings: Settings, arguments: Callable[[Arrange], dict[str, Any]]) -> tuple[bool, Metrics]:
    """Call a log function. Return whether it replaces the default log, and the metrics that it sent by `log`.

    `arguments` builds the arguments of a call from arranged samples.
    """
    args = FlatSettings(settings)
    with collected_metrics() as logged:

        def arranged(arrange: Arrange) -> dict[str, Any]:
            logged.clear()  # from an earlier call, with the samples in another arrangement
            return {"args": args, "settings": args, **arguments(arrange)}

        result = plain_value(call_with_samples(function, arranged))
    if result is not None and not isinstance(result, bool):
        raise function.returned(result, "True to skip the default log, else False")
    return bool(result), logged


def _check_numbers(function: Hook, metrics: Metrics) -> Metrics:
    """Return the metrics as plain numbers. Raises HookError for names or values that trackers reject."""
    numbers = {}
    for name, value in metrics.items():
        number = plain_number(value)
        if not isinstance(name, str) or number is None or math.isinf(number):
            raise function.returned(value, f"numbers only: the metric {name!r} is not a number")
        numbers[name] = number
    return numbers
