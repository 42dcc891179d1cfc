"""Functions of the user that stages call, as one object; its defaults change nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimectl.protocols import Agent, BufferFilter, GroupFilter, Policy, SampleHook
from slimectl.stages.whole_rounds import GroupSource, RoundObserver, RoundSampler
from slimectl.types import Loss, Metrics, Sample, StepReport, TrainingSample

if TYPE_CHECKING:
    from slimectl.algorithms.losses import PolicyLoss
    from slimectl.stages.generation import GroupGenerator

Group = list[Sample]
Rows = Sequence[TrainingSample]
RowFunction = Callable[[Rows, Sequence[Sample], Sequence[float]], None]
"""Called with rows, their samples and rewards; changes the rows."""


def oldest_first(buffer: list[Group], count: int, rollout_id: int) -> list[Group]:
    """Remove up to `count` groups from the buffer, oldest first, and return them."""
    groups = buffer[:count]
    del buffer[:count]
    return groups


def _ignore_round(groups: list[Group], source: GroupSource) -> None:
    """Do nothing with a finished round."""


def _ignore_step(policy: Policy, rollout_id: int, step_id: int) -> None:
    """Announce nothing to the policy."""


def _log_all(report: StepReport, metrics: Metrics) -> Metrics:
    return metrics


def _log_evaluation(rollout_id: int, samples: Mapping[str, Sequence[Sample]], metrics: Metrics) -> Metrics:
    return metrics


@dataclass(frozen=True)
class Hooks:
    """Functions of the user. The default of each changes nothing; with None, the stage takes its usual path.

    `slimectl.hooks.user_hooks.UserHooks` has the functions that settings name by path. In Python they can be given
    directly:

    >>> Hooks(keep_group=lambda group: len(group) > 1).on_sample is None
    True
    """

    # --- rollout -------------------------------------------------------------------------------------------------

    agent_at: Callable[[str], Agent] | None = None
    """Loads the agent that a sample names for itself, by path."""

    on_sample: SampleHook | None = None
    """Called with each sample after its generation; returns it or a replacement."""

    sample_rounds: Callable[[GroupGenerator], RoundSampler] | None = None
    """Makes the sampler of whole rounds that replaces the scheduler."""

    keep_group: GroupFilter | None = None
    """Decides whether a finished group is trained on (dynamic sampling)."""

    take_from_buffer: BufferFilter = oldest_first
    """Removes from the buffer the groups with which a round starts, and returns them."""

    on_round: RoundObserver = _ignore_round
    """Called with all groups of a round, also with those that `keep_group` dropped, and with their source."""

    # --- training with a policy gradient -------------------------------------------------------------------------

    filter_samples: Callable[[Sequence[Sample]], None] | None = None
    """Sets `remove_sample` of those samples of a round that are not to be trained on."""

    convert: Callable[[list[Sample]], list[Sample]] | None = None
    """Returns the samples on which is trained in place of those of a round."""

    post_process_rewards: Callable[[Sequence[Sample]], tuple[list[float], list[float]]] | None = None
    """Returns (rewards to log, rewards that become advantages without comparison)."""

    advantages: RowFunction | None = None
    """Writes `TrainingSample.advantages` in place of the algorithm."""

    post_process_rows: Callable[[Rows, Sequence[Sample], Sequence[float], int], None] | None = None
    """Changes the rows of a round, whose number is the last argument, before training."""

    loss: Loss | None = None
    """Replaces the loss of the algorithm."""

    policy_loss: Callable[[PolicyLoss, Rows, Sequence[Hashable]], PolicyLoss] | None = None
    """Returns the loss of a step over rows of these trajectories, with another mismatch correction or reduction."""

    before_step: Callable[[Policy, int, int], None] = _ignore_step
    """Called with the policy, the round and the number of the step in it, before every optimizer step."""

    # --- logs ----------------------------------------------------------------------------------------------------

    log_rollout: Callable[[StepReport, Metrics], Metrics] = _log_all
    """Returns those metrics of a step with samples that trackers log."""

    log_eval: Callable[[int, Mapping[str, Sequence[Sample]], Metrics], Metrics] = _log_evaluation
    """Called with the round, the samples by dataset and the metrics; returns the metrics that trackers log."""


NO_HOOKS = Hooks()
