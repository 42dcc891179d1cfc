"""The users' functions that stages call, in one object whose defaults change nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from slimectl.protocols import Agent, BufferFilter, GroupFilter, Policy, SampleHook
from slimectl.types import Loss, Metrics, Sample, StepReport, TrainingSample

if TYPE_CHECKING:
    from slimectl.algorithms.losses import PolicyLoss

Group = list[Sample]
Rows = Sequence[TrainingSample]
RowFunction = Callable[[Rows, Sequence[Sample], Sequence[float]], None]
"""Called with rows, their samples and rewards. Changes the rows."""


class RoundSampler(Protocol):
    """Samples one round at a time."""

    def groups(self, rollout_id: int, source: Any) -> tuple[list[Group], Metrics]:
        """Return the ungraded groups of a round (none at the end) and metrics."""
        ...

    def close(self) -> None:
        """Cancel the groups in flight."""
        ...


def oldest_first(buffer: list[Group], count: int, rollout_id: int) -> list[Group]:
    """Remove up to `count` groups from the buffer, oldest first, and return them."""
    groups = buffer[:count]
    del buffer[:count]
    return groups


def _ignore_round(groups: list[Group], source: Any) -> None:
    """Do nothing with a finished round."""


def _ignore_step(policy: Policy, rollout_id: int, step_id: int) -> None:
    """Do nothing before a step."""


def _log_all(report: StepReport, metrics: Metrics) -> Metrics:
    return metrics


def _log_evaluation(rollout_id: int, samples: Mapping[str, Sequence[Sample]], metrics: Metrics) -> Metrics:
    return metrics


@dataclass(frozen=True)
class Hooks:
    """The user's functions. The default of each changes nothing. With None, the stage does what it usually does.

    `slimectl.hooks.user_hooks.UserHooks` has the functions whose paths are in the settings. In Python, they can be
    passed directly:

    >>> Hooks(keep_group=lambda group: len(group) > 1).on_sample is None
    True
    """

    # --- rollout -------------------------------------------------------------------------------------------------

    agent_at: Callable[[str], Agent] | None = None
    """Loads the agent that a sample names by path."""

    on_sample: SampleHook | None = None
    """Called with each sample after its generation. Returns it or a replacement."""

    sample_rounds: Callable[[Any], RoundSampler] | None = None
    """Creates the sampler of whole rounds that replaces the scheduler, from a GroupGenerator."""

    keep_group: GroupFilter | None = None
    """Decides whether a finished group is trained on (dynamic sampling)."""

    take_from_buffer: BufferFilter = oldest_first
    """Removes the groups with which a round starts from the buffer, and returns them."""

    on_round: Callable[[list[Group], Any], None] = _ignore_round
    """Called with all groups of a round, including groups that `keep_group` dropped, and with their source."""

    # --- training with a policy gradient -------------------------------------------------------------------------

    filter_samples: Callable[[Sequence[Sample]], None] | None = None
    """Sets `remove_sample` of the samples of a round that should not be trained on."""

    convert: Callable[[list[Sample]], list[Sample]] | None = None
    """Returns the samples to train on instead of the samples of a round."""

    post_process_rewards: Callable[[Sequence[Sample]], tuple[list[float], list[float]]] | None = None
    """Returns (rewards to log, rewards to use as advantages without comparison)."""

    advantages: RowFunction | None = None
    """Sets `TrainingSample.advantages` instead of the algorithm."""

    post_process_rows: Callable[[Rows, Sequence[Sample], Sequence[float], int], None] | None = None
    """Changes the rows of a round before training. The last argument is the number of the round."""

    loss: Loss | None = None
    """Replaces the loss of the algorithm."""

    policy_loss: Callable[[PolicyLoss, Rows, Sequence[Hashable]], PolicyLoss] | None = None
    """Returns the loss of a step over rows of these trajectories, with another mismatch correction or reduction."""

    before_step: Callable[[Policy, int, int], None] = _ignore_step
    """Called before every optimizer step with the policy, the round and the number of the step in the round."""

    # --- logs ----------------------------------------------------------------------------------------------------

    log_rollout: Callable[[StepReport, Metrics], Metrics] = _log_all
    """Returns the metrics that trackers log for a step with samples."""

    log_eval: Callable[[int, Mapping[str, Sequence[Sample]], Metrics], Metrics] = _log_evaluation
    """Called with the round, the samples by dataset and the metrics. Returns the metrics that trackers log."""


NO_HOOKS = Hooks()
