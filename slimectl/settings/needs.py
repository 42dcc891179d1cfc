"""What the rest of the code may ask of an algorithm's settings: its needs, its data, its models, its reduction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

from slimectl.settings.base import Section

Baseline = Literal["group_mean", "leave_one_out", "length_weighted", "mean_normalized", "none"]
Reduction = Literal["rollout_mean", "per_token", "fixed_length"]


class Need(StrEnum):
    """A prerequisite of an algorithm, besides the policy and tokens with a loss mask."""

    REWARDS = "rewards"
    """A reward for every sample."""

    GROUPS = "groups"
    """Several answers to a prompt, which are compared with one another."""

    PAIRS = "pairs"
    """Pairs of a better and a worse answer."""

    CRITIC = "critic"
    """Values from before the updates of the round, of a critic that is trained beside the policy."""

    REFERENCE = "reference"
    """Log-probabilities of a frozen reference."""

    TEACHER = "teacher"
    """Log-probabilities of a teacher."""

    OLD_LOG_PROBS = "old_log_probs"
    """The policy's log-probabilities from before the updates of the round, before advantages or loss exist."""

    ROLLOUT_LOG_PROBS = "rollout_log_probs"
    """Log-probabilities that the engine recorded."""


@dataclass(frozen=True)
class CriticOptions:
    """The critic that an algorithm trains: where it begins, and how it learns beside the policy."""

    load: str | None
    lr: float
    shared: bool
    """Policy and critic are one model."""

    only_steps: int
    """First steps, in which the critic alone is updated, if the two are separate."""


@dataclass(frozen=True)
class TeacherOptions:
    """The teacher of on-policy distillation: a model directory, or servers."""

    load: str | None
    urls: tuple[str, ...]
    api: str
    """API that the servers speak."""

    kl_coef: float
    """Weight of the divergence from the teacher, taken off the advantage of each token."""


class AlgorithmSection(Section):
    """Base class of the settings of an algorithm. The defaults are those of one that needs no other model."""

    trains_on: ClassVar[Literal["rollouts", "demonstrations", "preferences"]] = "rollouts"
    """Samples of the policy itself. Answers to imitate. Answers of which one is better than the other."""

    baseline: ClassVar[Baseline] = "none"
    """What a reward is compared with. With "none" a prompt needs no second answer."""

    trained_output: ClassVar[Literal["log_probs", "values"]] = "log_probs"
    """The output of the model that the loss is of: a reward model is trained by its values."""

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
    def whitens_advantages(self) -> bool:
        """Whether advantages are normalized over all tokens of a round."""
        return False

    @property
    def reference_load(self) -> str | None:
        """Model of the reference. None for the one that training starts from."""
        return None

    @property
    def reference_interval(self) -> int | None:
        """Rounds after which the reference becomes the policy of then. None if it never does."""
        return None

    @property
    def critic_options(self) -> CriticOptions | None:
        """The critic that is trained beside the policy. None without one."""
        return None

    @property
    def critic_only_steps(self) -> int:
        """Number of steps at the start of a run in which only a separate critic is updated."""
        options = self.critic_options
        return 0 if options is None or options.shared else options.only_steps

    @property
    def teacher_options(self) -> TeacherOptions | None:
        """The teacher that the policy is distilled from. None without one."""
        return None

    def conflicts(self, *, temperature: float) -> Iterator[str]:
        """Yield conflicts within [algorithm], each as a line that names the keys and the remedy.

        `temperature` is that of the rollout.
        """
        return iter(())
