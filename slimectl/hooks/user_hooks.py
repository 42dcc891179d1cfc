"""The hooks that settings name by path, as the object that stages call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from slimectl.hooks import logging, rollout, training_batch
from slimectl.hooks.registry import is_set
from slimectl.hooks.training_batch import LOSS, REDUCER, TIS
from slimectl.protocols import Policy, PreStepHook
from slimectl.settings import Settings
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.types import TrainingSample

if TYPE_CHECKING:
    from slimectl.algorithms.losses import PolicyLoss

STEP = "megatron.custom_before_train_step_hook_path"


class UserHooks(Hooks):
    """The functions named in `settings`. Each is loaded when it is first called; `check_hooks` loads them before."""

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
            log_rollout=on(logging.ROLLOUT, logging.user_rollout_log, NO_HOOKS.log_rollout),
            log_eval=on(logging.EVALUATION, logging.user_eval_log, NO_HOOKS.log_eval),
        )


def _announce_step(policy: Policy, rollout_id: int, step_id: int) -> None:
    """Announce the step to the policy, which calls the function on its ranks."""
    cast(PreStepHook, policy).before_step(rollout_id, step_id)


# Imported where they are needed: commands that only sample start without torch.


def _custom_loss(settings: Settings) -> Any:
    from slimectl.hooks.loss import CustomLoss

    return CustomLoss(settings)


def _policy_loss(
    loss: PolicyLoss, rows: Sequence[TrainingSample], trajectory_ids: Sequence[int], *, settings: Settings
) -> PolicyLoss:
    from slimectl.hooks.loss import user_policy_loss

    return user_policy_loss(loss, rows, trajectory_ids, settings)
