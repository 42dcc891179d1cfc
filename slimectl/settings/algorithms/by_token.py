"""Algorithms with per-token advantages."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slimectl.settings.algorithms.policy_gradient import Baseline, Clipped
from slimectl.settings.base import Section


class Whitened(Clipped):
    """The REINFORCE++ family: per-token advantages, whitened over the whole round."""

    normalize_advantages: bool = True
    """Whiten the advantages over all tokens of the round; this family needs it."""


class ReinforcePlusPlus(Whitened):
    """Returns of every token, whitened over the batch instead of a group (Hu et al. 2025, arXiv:2501.03262)."""

    baseline: ClassVar[Baseline] = "none"

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """Which algorithm."""

    drop_zero_std_groups: bool = False
    """Leave out groups whose rewards are all equal; here they count, as no group is compared within itself."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward for each token before it."""


class ReinforcePlusPlusBaseline(Whitened):
    """REINFORCE++ with a baseline: reward less the group's mean, whitened over the batch (arXiv:2501.03262)."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """Which algorithm."""

    drop_zero_std_groups: bool = False
    """Leave out groups whose rewards are all equal; here they count in the scale of the batch."""


class Ppo(Whitened):
    """Proximal policy optimisation with a critic (Schulman et al. 2017, arXiv:1707.06347)."""

    baseline: ClassVar[Baseline] = "none"

    name: Literal["ppo"] = "ppo"
    """Which algorithm."""

    drop_zero_std_groups: bool = False
    """Leave out groups whose rewards are all equal; here they count, as answers are compared with the critic."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step, for policy and critic alike."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward for each token before it; an answer has an end."""

    lambd: Annotated[float, Field(ge=0, le=1)] = 0.95
    """GAE's lambda (arXiv:1506.02438): 1 trusts returns alone, 0 the critic alone."""

    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """How far a value may move from the one that the round began with before its gradient stops."""

    critic: Literal["own", "shared"] = "own"
    """A model of its own with its own optimizer, or a value head on the policy's backbone, learnt with it, in half the
    memory."""

    value_coef: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the value loss beside the policy's, where the critic is shared."""

    critic_load: str | None = None
    """Model or critic that the critic begins from; the one that the run starts from where not given."""

    critic_lr: Annotated[float, Field(ge=0)] = 1e-5
    """The critic's learning rate, constant; all else of its optimizer is [train]'s."""

    num_critic_only_steps: Annotated[int, Field(ge=0)] = 0
    """First steps, in which the critic learns and the policy stays as it is."""


def critic_is_shared(algorithm: Section) -> bool:
    """Whether policy and critic share one model."""
    return isinstance(algorithm, Ppo) and algorithm.critic == "shared"


class Opd(Clipped):
    """On-policy distillation: reverse KL to a teacher, token by token (Agarwal et al. 2023, arXiv:2306.13649)."""

    baseline: ClassVar[Baseline] = "none"

    name: Literal["opd"] = "opd"
    """Which algorithm."""

    drop_zero_std_groups: bool = False
    """Leave out groups whose rewards are all equal; here rewards are reported and nothing else."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step."""

    opd_kl_coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of log p(token) - log p_teacher(token), the advantage's negative."""
