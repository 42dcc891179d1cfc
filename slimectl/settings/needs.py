"""Interface of an algorithm's settings: its needs, data, models and loss reduction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

from slimectl.settings.base import Section
from slimectl.settings.teachers import TeacherOptions

Baseline = Literal["group_mean", "leave_one_out", "length_weighted", "mean_normalized", "decoupled", "none"]
NormKind = Literal["group", "batch", "running", "off"]
Reduction = Literal["rollout_mean", "per_token", "fixed_length"]


class Need(StrEnum):
    """A prerequisite of an algorithm, in addition to the policy and tokens with a loss mask."""

    REWARDS = "rewards"
    """A reward for every sample."""

    COMPONENTS = "components"
    """Named components of every reward."""

    TURN_REWARDS = "turn_rewards"
    """A reward for every turn of the policy."""

    GROUPS = "groups"
    """Several responses to a prompt, which are compared with each other."""

    PAIRS = "pairs"
    """Pairs of a better and a worse response."""

    CRITIC = "critic"
    """Values of a critic that is trained along with the policy, from before the updates of the round."""

    REFERENCE = "reference"
    """Log-probabilities of a frozen reference."""

    TEACHER = "teacher"
    """Log-probabilities of a teacher."""

    TEACHER_TOP = "teacher_top"
    """The likeliest tokens of a teacher, with their log-probabilities."""

    OLD_LOG_PROBS = "old_log_probs"
    """The policy's log-probabilities from before the updates of the round, before advantages or loss exist."""

    ROLLOUT_LOG_PROBS = "rollout_log_probs"
    """Log-probabilities that the engine recorded."""


@dataclass(frozen=True)
class CriticOptions:
    """The critic that an algorithm trains: its initial model and how it is trained along with the policy."""

    load: str | None
    lr: float
    shared: bool
    """Policy and critic are one model."""

    only_steps: int
    """Number of first steps that update only the critic, if the two are separate."""


class AlgorithmSection(Section):
    """Base class of the settings of an algorithm. The defaults suit an algorithm without other models."""

    trains_on: ClassVar[Literal["rollouts", "demonstrations", "preferences"]] = "rollouts"
    """rollouts: samples of the policy. demonstrations: responses to imitate. preferences: pairs of responses."""

    baseline: ClassVar[Baseline] = "none"
    """Baseline that a reward is compared with. With "none", one response per prompt is enough."""

    trained_output: ClassVar[Literal["log_probs", "values"]] = "log_probs"
    """Model output that the loss is computed from. A reward model is trained through its values."""

    @property
    def needs(self) -> frozenset[Need]:
        """Prerequisites of the algorithm under these settings."""
        return frozenset()

    @property
    def reduction(self) -> tuple[Reduction, int | None]:
        """Kind of the reduction of a step, and its length if that is fixed (algorithms/reductions.py)."""
        return "rollout_mean", None

    @property
    def std_normalization(self) -> bool:
        """Whether rewards are divided by the standard deviation of their group."""
        return False

    @property
    def norm_kinds(self) -> tuple[NormKind, NormKind] | None:
        """Populations of the mean and the std that replace the baseline, or None to compare with the baseline."""
        return None

    @property
    def whitens_advantages(self) -> bool:
        """Whether advantages are normalized over all tokens of a round."""
        return False

    @property
    def reference_load(self) -> str | None:
        """Path of the reference model. None means the model that training starts from."""
        return None

    @property
    def reference_interval(self) -> int | None:
        """Rounds after which the reference is replaced by the current policy. None means never."""
        return None

    @property
    def critic_options(self) -> CriticOptions | None:
        """Options of the critic that is trained along with the policy, or None without one."""
        return None

    @property
    def critic_only_steps(self) -> int:
        """Number of steps at the start of a run in which only a separate critic is updated."""
        options = self.critic_options
        return 0 if options is None or options.shared else options.only_steps

    @property
    def teacher_options(self) -> TeacherOptions | None:
        """Options of the teacher that the policy is distilled from, or None without one."""
        return None

    @property
    def learns_from_teachers_samples(self) -> bool:
        """Whether samples of a file may be a teacher's own, because only its distributions are learned from."""
        return False

    def conflicts(self, *, temperature: float) -> Iterator[str]:
        """Yield each conflict within [algorithm] as one line with the keys and the remedy.

        `temperature` is rollout.temperature.
        """
        return iter(())
