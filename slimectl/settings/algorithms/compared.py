"""Algorithms with group-relative advantages: the answers to a prompt are compared with each other."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slimectl.settings.algorithms.policy_gradient import Baseline, Bounded, Clipped, GroupNormalized, Surrogate


class Grpo(GroupNormalized, Clipped):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

    name: Literal["grpo"] = "grpo"
    """Which algorithm."""


class DrGrpo(GroupNormalized, Clipped):
    """GRPO done right: blind to lengths and to a group's spread (Liu et al. 2025, arXiv:2503.20783)."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """Which algorithm."""

    grpo_std_normalization: bool = False
    """Divide by the group's standard deviation; off, or too easy and too hard prompts would weigh more."""

    fixed_length: Annotated[int, Field(ge=1)] | None = 3000
    """Divide each rollout's sum by this constant, not its own length; the paper's is its longest answer, in tokens."""


class Dapo(GroupNormalized, Clipped):
    """GRPO with clip-higher, dynamic sampling and a mean over tokens (Yu et al. 2025, arXiv:2503.14476).

    Its overlong penalty is a reward: score.rm_type "overlong".
    """

    name: Literal["dapo"] = "dapo"
    """Which algorithm."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = 0.28
    """How far it may rise above 1: wider than it may fall, so that rare tokens can grow."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step, so that a token of a long answer counts as much as one of a short answer."""


class Gspo(GroupNormalized, Clipped):
    """Group sequence policy optimisation: one ratio per answer (Zheng et al. 2025, arXiv:2507.18071)."""

    surrogate: ClassVar[Surrogate] = "gspo"

    name: Literal["gspo"] = "gspo"
    """Which algorithm."""

    eps_clip: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """How far the ratio of an answer, a mean over its tokens, may fall below 1 before its gradient stops."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = 4e-4
    """How far it may rise above 1; eps_clip where not given."""


class Cispo(GroupNormalized, Bounded):
    """Clipped importance weights, so that every token keeps its gradient (MiniMax 2025, arXiv:2506.13585)."""

    surrogate: ClassVar[Surrogate] = "cispo"

    name: Literal["cispo"] = "cispo"
    """Which algorithm."""

    eps_clip: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How far a token's weight may fall below 1; at 1 there is no bound."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = 4.0
    """How far it may rise above 1; eps_clip where not given."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step rather than over rollouts of each one's mean."""


class Sapo(GroupNormalized):
    """Soft adaptive policy optimisation: a gate instead of a clip (Qwen 2025, arXiv:2511.20347)."""

    surrogate: ClassVar[Surrogate] = "sapo"

    name: Literal["sapo"] = "sapo"
    """Which algorithm."""

    tau_pos: Annotated[float, Field(gt=0)] = 1.0
    """How fast the gate closes for good tokens, as their ratio leaves 1."""

    tau_neg: Annotated[float, Field(gt=0)] = 1.05
    """The same for bad ones: faster, as their gradient raises many other tokens."""


class Gmpo(GroupNormalized, Bounded):
    """Geometric-mean policy optimisation (Zhao et al. 2025, arXiv:2507.20673)."""

    surrogate: ClassVar[Surrogate] = "gmpo"

    name: Literal["gmpo"] = "gmpo"
    """Which algorithm."""

    eps_clip: Annotated[float, Field(gt=0, le=1)] = 0.4
    """How far a token's log-ratio may fall below 0 before its gradient stops."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = None
    """How far it may rise above 0; eps_clip where not given."""


class Rloo(Clipped):
    """REINFORCE, leave-one-out: the others are the baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""

    baseline: ClassVar[Baseline] = "leave_one_out"

    name: Literal["rloo"] = "rloo"
    """Which algorithm."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step: the gradient of whole answers, as in the paper, on the scale of a token."""


class Opo(Clipped):
    """On-policy RL with the optimal, length-weighted baseline (Hao et al. 2025, arXiv:2505.23585)."""

    baseline: ClassVar[Baseline] = "length_weighted"

    name: Literal["opo"] = "opo"
    """Which algorithm."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step: the gradient of whole answers, whose variance the baseline makes least."""


class MaxRl(Clipped):
    """Maximum-likelihood RL: hard prompts weigh by the inverse of their success (Tajwar et al. 2026, arXiv:2602.02710).

    For rewards from 0 on, 0 for a wrong answer.
    """

    baseline: ClassVar[Baseline] = "mean_normalized"

    name: Literal["maxrl"] = "maxrl"
    """Which algorithm."""
