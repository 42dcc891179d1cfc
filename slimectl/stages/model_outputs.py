"""Second pass over a round: outputs of policy and critic from before its updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slimectl.protocols import Critic, Policy
from slimectl.settings.needs import AlgorithmSection, Need
from slimectl.stages.hooks import Hooks
from slimectl.types import TrainingSample


@dataclass(frozen=True)
class Models:
    """The models that a step updates: the policy, and the critic if there is one."""

    policy: Policy
    critic: Critic | None = None


def attach_model_outputs(
    rows: Sequence[TrainingSample], models: Models, algorithm: AlgorithmSection, hooks: Hooks, *, several_steps: bool
) -> None:
    """Write `TrainingSample.old_log_probs` and `.values` where they are needed; what a row has already is kept.

    In one step the policy does not change before the loss, which uses its own detached log-probabilities as the old
    ones, unless an advantage or a hook reads them: the same numbers with one forward pass less.
    """
    if algorithm.trains_on != "rollouts":
        return
    hooks_read = hooks.advantages is not None or hooks.post_process_rows is not None
    lacking = [row for row in rows if row.old_log_probs is None]
    if lacking and (several_steps or hooks_read or Need.OLD_LOG_PROBS in algorithm.needs):
        for row, log_probs in zip(lacking, models.policy.log_probs(lacking), strict=True):
            row.old_log_probs = log_probs
    unjudged = [row for row in rows if row.values is None]
    if unjudged and Need.CRITIC in algorithm.needs:
        assert models.critic is not None
        for row, values in zip(unjudged, models.critic.values(unjudged), strict=True):
            row.values = values
