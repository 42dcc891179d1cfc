"""Detects rounds whose rewards carry no learning signal, counts them, and suggests a remedy."""

from __future__ import annotations

from dataclasses import dataclass

from slimectl.algorithms.estimators import TrainingBatch
from slimectl.settings import Settings
from slimectl.settings.needs import Need
from slimectl.stages.hooks import Hooks
from slimectl.system.stdio import quantity
from slimectl.types import Status

NO_SIGNAL = "rollout/no_signal"
"""Metric of a round without signal. Other rounds do not have it."""


TOO_LONG, TOO_EASY = "of the responses reached rollout.max_response_len", "the prompts are too easy"
REMEDIES = {
    TOO_LONG: "Raise rollout.max_response_len, or ask for shorter responses",
    TOO_EASY: "Train on harder prompts, or make the reward stricter",
}
"""Remedies for reasons other than a wrong reward."""


@dataclass
class SignalCount:
    """Counts rounds with and without signal. It is part of every checkpoint.

    >>> count = SignalCount()
    >>> for reason in ("", "every reward was 0", "every reward was 0"):
    ...     count.add(reason)
    >>> count.rounds, count.without, count.in_a_row
    (3, 2, 2)
    """

    rounds: int = 0

    without: int = 0
    """Rounds without signal."""

    in_a_row: int = 0
    """Rounds without signal since the last one that had some."""

    reason: str = ""
    """Why the last round without signal had none."""

    def add(self, reason: str) -> None:
        """Count a round. The reason is empty if the round carried signal."""
        self.rounds += 1
        self.without += bool(reason)
        self.in_a_row = self.in_a_row + 1 if reason else 0
        self.reason = reason or self.reason

    def remedy(self, reward_check: str) -> str:
        """Return the remedy for the last round without signal: `reward_check`, unless its reason has another remedy."""
        return next((remedy for reason, remedy in REMEDIES.items() if reason in self.reason), reward_check)

    def message_in_a_row(self, remedy: str) -> str:
        """Return the message about the rounds without signal in a row."""
        return f"no learning signal in {quantity(self.in_a_row, 'round')} in a row: {self.reason}. {remedy}"

    def closing_message(self, remedy: str) -> str:
        """Return the message at the end of the rounds, or "" if most of them carried signal."""
        few = 2 * self.without <= self.rounds
        rounds = f"{self.without} of {quantity(self.rounds, 'round')}"
        return "" if few else f"no learning signal in {rounds}: {self.reason}. {remedy}"


NO_WEIGHT = "the weight of every sample's teacher was 0"


def missing_signal(batch: TrainingBatch, settings: Settings, hooks: Hooks) -> str:
    """Return why the rewards of a round carry no signal, or "" if they do.

    A teacher, rewards of turns, and the user's own advantages or loss give a signal without rewards. A single response
    is not compared with others, so its own advantage counts.
    """
    algorithm = settings.algorithm
    if algorithm.trains_on != "rollouts" or hooks.loss is not None:
        return ""
    if not batch.samples:
        return "no sample was left to train on"
    same = "" if batch.rewards_differ else _equal_rewards(batch, settings)
    teacher = algorithm.teacher_options
    if teacher is not None:
        if teacher.divergence != "token" and any(row.teacher_weight for row in batch.rows):
            return ""
        if Need.REWARDS not in algorithm.needs and not any(row.teacher_weight for row in batch.rows):
            return "no sample had all fields of algorithm.opd_teacher_template" if teacher.template else NO_WEIGHT
    weighted = ((row.advantages, row.loss_weights) for row in batch.rows)
    if not any(a and w for advantages, weights in weighted for a, w in zip(advantages, weights, strict=False)):
        within = "" if batch.any_group_differs else "the rewards of every group were equal"
        return same or within or "every advantage was 0"
    if (
        {Need.TEACHER, Need.TURN_REWARDS} & algorithm.needs
        or hooks.advantages is not None
        or hooks.post_process_rows is not None
    ):
        return ""
    if Need.GROUPS in algorithm.needs and not batch.compared and not batch.any_group_differs:
        return same or "the rewards of every group were equal"
    return same if len(batch.rewards) > 1 else ""


def _equal_rewards(batch: TrainingBatch, settings: Settings) -> str:
    """Return what equal rewards mean: truncated responses, prompts that are too easy, or neither."""
    same = f"every reward was {batch.rewards[0]:g}"
    if batch.rewards[0] >= settings.eval.success_threshold:
        return f"{same}: {TOO_EASY}"
    if all(sample.status is Status.TRUNCATED for sample in batch.samples):
        return f"{same}, and 100 % {TOO_LONG}"
    return same
