"""Second pass over a round: outputs of policy and critic from before its updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slimectl.protocols import Critic, Policy
from slimectl.settings.needs import AlgorithmSection, Need
from slimectl.types import TrainingSample


@dataclass(frozen=True)
class Models:
    """The models that a step updates: the policy, and the critic if there is one."""

    policy: Policy
    critic: Critic | None = None


def attach_model_outputs(
    rows: Sequence[TrainingSample], models: Models, algorithm: AlgorithmSection, *, old_log_probs: bool
) -> None:
    """Write `TrainingSample.old_log_probs` if they are asked for, and `.values` if the algorithm has a critic.

    What a row has already is kept. If all rows are new and make one step, the policy does not change before their loss,
    which uses its own detached values instead: the same numbers with one forward pass less.
    """
    lacking = [row for row in rows if row.old_log_probs is None]
    if lacking and old_log_probs:
        for row, log_probs in zip(lacking, models.policy.log_probs(lacking), strict=True):
            row.old_log_probs = log_probs
    unjudged = [row for row in rows if row.values is None]
    if unjudged and Need.CRITIC in algorithm.needs:
        assert models.critic is not None
        for row, values in zip(unjudged, models.critic.values(unjudged), strict=True):
            row.values = values
