"""Policy-gradient algorithms by name, with the defaults of their papers, and the union of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slimectl.settings.needs import Baseline, CriticOptions, Need
from slimectl.settings.policy_gradient import ClippedRatio, GroupNormalized, RatioBounds


class Grpo(GroupNormalized, ClippedRatio):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

    name: Literal["grpo"] = "grpo"
    """Which algorithm."""


class DrGrpo(GroupNormalized, ClippedRatio):
    """GRPO done right: blind to lengths and to a group's spread (Liu et al. 2025, arXiv:2503.20783)."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """Which algorithm."""

    grpo_std_normalization: bool = False
    """Divide by the group's standard deviation; off, or too easy and too hard prompts would weigh more."""

    fixed_length: Annotated[int, Field(ge=1)] | None = 3000
    """Divide each rollout's sum by this constant, not its own length; the paper's is its longest answer, in tokens."""


class Dapo(GroupNormalized, ClippedRatio):
    """GRPO with clip-higher, dynamic sampling and a mean over tokens (Yu et al. 2025, arXiv:2503.14476).

    Its overlong penalty is a reward: score.rm_type "overlong".
    """

    name: Literal["dapo"] = "dapo"
    """Which algorithm."""

    drop_zero_std_groups: bool = True
    """Leave out groups whose rewards are all equal: they carry no signal, only weight in the mean."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = 0.28
    """How far it may rise above 1: wider than it may fall, so that rare tokens can grow."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step, so that a token of a long answer counts as much as one of a short answer."""


class Gspo(GroupNormalized, ClippedRatio):
    """Group sequence policy optimisation: one ratio per answer (Zheng et al. 2025, arXiv:2507.18071)."""

    surrogate: ClassVar[str] = "gspo"

    name: Literal["gspo"] = "gspo"
    """Which algorithm."""

    eps_clip: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """How far the ratio of an answer, a mean over its tokens, may fall below 1 before its gradient stops."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = 4e-4
    """How far it may rise above 1; eps_clip where not given."""


class Cispo(GroupNormalized, RatioBounds):
    """Clipped importance weights, so that every token keeps its gradient (MiniMax 2025, arXiv:2506.13585)."""

    surrogate: ClassVar[str] = "cispo"

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

    surrogate: ClassVar[str] = "sapo"

    name: Literal["sapo"] = "sapo"
    """Which algorithm."""

    tau_pos: Annotated[float, Field(gt=0)] = 1.0
    """How fast the gate closes for good tokens, as their ratio leaves 1."""

    tau_neg: Annotated[float, Field(gt=0)] = 1.05
    """The same for bad ones: faster, as their gradient raises many other tokens."""


class Gmpo(GroupNormalized, RatioBounds):
    """Geometric-mean policy optimisation (Zhao et al. 2025, arXiv:2507.20673)."""

    surrogate: ClassVar[str] = "gmpo"

    name: Literal["gmpo"] = "gmpo"
    """Which algorithm."""

    eps_clip: Annotated[float, Field(gt=0, le=1)] = 0.4
    """How far a token's log-ratio may fall below 0 before its gradient stops."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = None
    """How far it may rise above 0; eps_clip where not given."""


class Rloo(ClippedRatio):
    """REINFORCE, leave-one-out: the others are the baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""

    baseline: ClassVar[Baseline] = "leave_one_out"

    name: Literal["rloo"] = "rloo"
    """Which algorithm."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step: the gradient of whole answers, as in the paper, on the scale of a token."""


class Opo(ClippedRatio):
    """On-policy RL with the optimal, length-weighted baseline (Hao et al. 2025, arXiv:2505.23585)."""

    baseline: ClassVar[Baseline] = "length_weighted"

    name: Literal["opo"] = "opo"
    """Which algorithm."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step: the gradient of whole answers, whose variance the baseline makes least."""


class MaxRl(ClippedRatio):
    """Maximum-likelihood RL: hard prompts weigh by the inverse of their success (Tajwar et al. 2026, arXiv:2602.02710).

    For rewards from 0 on, 0 for a wrong answer.
    """

    baseline: ClassVar[Baseline] = "mean_normalized"

    name: Literal["maxrl"] = "maxrl"
    """Which algorithm."""


class ReinforceFamily(ClippedRatio):
    """The REINFORCE++ family: per-token advantages, whitened over the whole round."""

    normalize_advantages: bool = True
    """Whiten the advantages over all tokens of the round; this family needs it."""

    def conflicts(self, *, temperature: float) -> Iterator[str]:
        if not self.normalize_advantages:
            yield f"algorithm.normalize_advantages: algorithm.name {self.name} needs it; drop the key"
        yield from super().conflicts(temperature=temperature)


class ReinforcePlusPlus(ReinforceFamily):
    """Returns of every token, whitened over the batch instead of a group (Hu et al. 2025, arXiv:2501.03262)."""

    baseline: ClassVar[Baseline] = "none"

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """Which algorithm."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward for each token before it."""


class ReinforcePlusPlusBaseline(ReinforceFamily):
    """REINFORCE++ with a baseline: reward less the group's mean, whitened over the batch (arXiv:2501.03262)."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """Which algorithm."""


class Ppo(ReinforceFamily):
    """Proximal policy optimisation with a critic (Schulman et al. 2017, arXiv:1707.06347)."""

    baseline: ClassVar[Baseline] = "none"

    name: Literal["ppo"] = "ppo"
    """Which algorithm."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step, for policy and critic alike."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward for each token before it; an answer has an end."""

    lambd: Annotated[float, Field(ge=0, le=1)] = 0.95
    """GAE's lambda (arXiv:1506.02438): 1 trusts returns alone, 0 the critic alone."""

    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """How far a value may move from the one that the round began with before its gradient stops."""

    critic: Literal["separate", "shared"] = "separate"
    """separate: a model of its own with its own optimizer; shared: a value head on the policy's backbone, learnt with
    it, in half the memory."""

    value_coef: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the value loss beside the policy's, where the critic is shared."""

    critic_load: str | None = None
    """Model or critic that the critic begins from; the one that the run starts from where not given."""

    critic_lr: Annotated[float, Field(ge=0)] = 1e-5
    """The critic's learning rate, constant; all else of its optimizer is [train]'s."""

    num_critic_only_steps: Annotated[int, Field(ge=0)] = 0
    """First steps, in which the critic learns and the policy stays as it is."""

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {Need.CRITIC}

    @property
    def critic_options(self) -> CriticOptions:
        return CriticOptions(
            load=self.critic_load,
            lr=self.critic_lr,
            shared=self.critic == "shared",
            only_steps=self.num_critic_only_steps,
        )


class Opd(ClippedRatio):
    """On-policy distillation: reverse KL to a teacher, token by token (Agarwal et al. 2023, arXiv:2306.13649)."""

    baseline: ClassVar[Baseline] = "none"
    learns_from_rewards: ClassVar[bool] = False

    name: Literal["opd"] = "opd"
    """Which algorithm."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step."""

    opd_kl_coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of log p(token) - log p_teacher(token), the advantage's negative."""

    def conflicts(self, *, temperature: float) -> Iterator[str]:
        if self.kl_coef:
            yield (
                "algorithm.kl_coef has no effect with algorithm.name opd, which learns from no reward; use "
                "algorithm.kl_loss_coef"
            )
        yield from super().conflicts(temperature=temperature)


RolloutAlgorithm = (
    Grpo
    | DrGrpo
    | Dapo
    | Gspo
    | Cispo
    | Sapo
    | Gmpo
    | Rloo
    | Opo
    | MaxRl
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | Ppo
    | Opd
)
"""Settings of any algorithm that learns from rollouts, in the order of docs/algorithms.md."""
