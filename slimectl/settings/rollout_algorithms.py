"""Policy-gradient algorithms by name, with the defaults of their papers, and the union of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slimectl.settings.needs import Baseline, CriticOptions, Need
from slimectl.settings.policy_gradient import (
    ClippedRatio,
    ComparedTurns,
    GroupNormalized,
    NormalizedRewards,
    RatioBounds,
    TurnCredit,
)


class Grpo(GroupNormalized, ClippedRatio):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

    name: Literal["grpo"] = "grpo"
    """Which algorithm."""


class DrGrpo(GroupNormalized, ClippedRatio):
    """GRPO done right: without the biases from length and from a group's spread (Liu et al. 2025, arXiv:2503.20783)."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """Which algorithm."""

    grpo_std_normalization: bool = False
    """Divide by the group's standard deviation. Off by default, because dividing over-weights very easy and very hard
    prompts."""

    fixed_length: Annotated[int, Field(ge=1)] | None = 3000
    """Divide the sum of each rollout by this constant instead of its length. The paper uses its longest response, in
    tokens."""


class Dapo(GroupNormalized, ClippedRatio):
    """GRPO with clip-higher, dynamic sampling and a mean over tokens (Yu et al. 2025, arXiv:2503.14476).

    Its overlong penalty is a reward: score.rm_type "overlong".
    """

    name: Literal["dapo"] = "dapo"
    """Which algorithm."""

    drop_zero_std_groups: bool = True
    """Drop groups whose rewards are all equal. They have no signal and only dilute the mean."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = 0.28
    """Upper clip range. It is wider than eps_clip, so that rare tokens can grow."""

    calculate_per_token_loss: bool = True
    """Average over all tokens of the step, so that tokens of long and short responses count the same."""


class Gspo(GroupNormalized, ClippedRatio):
    """Group sequence policy optimisation: one ratio per response (Zheng et al. 2025, arXiv:2507.18071)."""

    surrogate: ClassVar[str] = "gspo"

    name: Literal["gspo"] = "gspo"
    """Which algorithm."""

    eps_clip: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """Lower clip range of the ratio of a response, a mean over its tokens."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = 4e-4
    """Upper clip range. Default: eps_clip."""


class Cispo(GroupNormalized, RatioBounds):
    """Clipped importance weights, so that every token keeps its gradient (MiniMax 2025, arXiv:2506.13585)."""

    surrogate: ClassVar[str] = "cispo"

    name: Literal["cispo"] = "cispo"
    """Which algorithm."""

    eps_clip: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Lower bound of a token's weight, as the distance from 1. A value of 1 turns the bound off."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = 4.0
    """Upper bound of a token's weight, as the distance from 1. Default: eps_clip."""

    calculate_per_token_loss: bool = True
    """Average over all tokens of the step, instead of over the mean of each rollout."""


class Sapo(GroupNormalized):
    """Soft adaptive policy optimisation: a gate instead of a clip (Qwen 2025, arXiv:2511.20347)."""

    surrogate: ClassVar[str] = "sapo"

    name: Literal["sapo"] = "sapo"
    """Which algorithm."""

    tau_pos: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the gate for tokens with a positive advantage. Higher closes faster as the ratio leaves 1."""

    tau_neg: Annotated[float, Field(gt=0)] = 1.05
    """The same for a negative advantage. It closes faster, because the gradient raises many other tokens."""


class Gmpo(GroupNormalized, RatioBounds):
    """Geometric-mean policy optimisation (Zhao et al. 2025, arXiv:2507.20673)."""

    surrogate: ClassVar[str] = "gmpo"

    name: Literal["gmpo"] = "gmpo"
    """Which algorithm."""

    eps_clip: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Lower clip range of a token's log-ratio."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = None
    """Upper clip range of a token's log-ratio. Default: eps_clip."""


class Topr(GroupNormalized):
    """Tapered off-policy REINFORCE: good responses are imitated, bad ones count less as the policy leaves them.

    Le Roux et al. 2025, arXiv:2503.14286. A response is good if its reward is above the baseline.
    """

    surrogate: ClassVar[str] = "topr"

    name: Literal["topr"] = "topr"
    """Which algorithm."""

    grpo_std_normalization: bool = False
    """Divide by the group's standard deviation. The paper only subtracts a baseline."""

    calculate_per_token_loss: bool = True
    """Average over all tokens of the step. This is the paper's gradient of whole responses, scaled to a token."""

    topr_level: Literal["token", "sequence", "geometric"] = "sequence"
    """Level of a bad response's ratio: per token, per response (product), or geometric mean over the response."""

    topr_clip: Annotated[float, Field(gt=0)] = 1.0
    """Upper bound of the ratio of a bad response."""

    topr_positive_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the loss of good responses."""

    topr_negative_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the loss of bad responses."""


class Rloo(ClippedRatio):
    """REINFORCE leave-one-out: the other responses are the baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""

    baseline: ClassVar[Baseline] = "leave_one_out"

    name: Literal["rloo"] = "rloo"
    """Which algorithm."""

    calculate_per_token_loss: bool = True
    """Average over all tokens of the step. This is the paper's gradient of whole responses, scaled to a token."""


class Opo(ClippedRatio):
    """On-policy RL with the optimal, length-weighted baseline (Hao et al. 2025, arXiv:2505.23585)."""

    baseline: ClassVar[Baseline] = "length_weighted"

    name: Literal["opo"] = "opo"
    """Which algorithm."""

    calculate_per_token_loss: bool = True
    """Average over all tokens of the step. This is the gradient of whole responses, for which the baseline is
    optimal."""


class MaxRl(ClippedRatio):
    """Maximum-likelihood RL: weights a prompt by 1 / its success rate (Tajwar et al. 2026, arXiv:2602.02710).

    For nonnegative rewards that are 0 for a wrong response.
    """

    baseline: ClassVar[Baseline] = "mean_normalized"

    name: Literal["maxrl"] = "maxrl"
    """Which algorithm."""


class Gdpo(ClippedRatio):
    """Group reward-decoupled normalisation: each component of the reward by itself (Liu et al. 2026, arXiv:2601.05242).

    GRPO normalises the sum, in which a component with a small spread has little say.
    """

    baseline: ClassVar[Baseline] = "decoupled"

    name: Literal["gdpo"] = "gdpo"
    """Which algorithm."""

    gdpo_weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """Weight of each component of the reward, by its key in the reward object. Default: the parts of score.rm with
    their weights. A weight multiplies the normalised component, so weights of 1 give all components the same say."""

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {Need.COMPONENTS}

    def conflicts(self, *, temperature: float) -> Iterator[str]:
        if self.kl_coef:
            yield (
                "algorithm.kl_coef has no effect with algorithm.name gdpo, which compares the components of the "
                "reward. Use algorithm.kl_loss_coef."
            )
        if self.gdpo_weights and not any(self.gdpo_weights.values()):
            yield "algorithm.gdpo_weights: every weight is 0. Give a component another weight."
        yield from super().conflicts(temperature=temperature)


class ReinforceFamily(NormalizedRewards, ClippedRatio):
    """The REINFORCE++ family: per-token advantages, whitened over the whole round."""

    normalize_advantages: bool = True
    """Whiten the advantages over all tokens of the round. This family needs it."""

    def conflicts(self, *, temperature: float) -> Iterator[str]:
        if not self.normalize_advantages:
            yield f"algorithm.normalize_advantages: algorithm.name {self.name} needs it. Drop the key."
        yield from super().conflicts(temperature=temperature)


class ReinforcePlusPlus(ReinforceFamily):
    """Per-token returns, whitened over the batch instead of a group (Hu et al. 2025, arXiv:2501.03262)."""

    baseline: ClassVar[Baseline] = "none"

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """Which algorithm."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Per-token discount factor."""


class ReinforcePlusPlusBaseline(ReinforceFamily):
    """REINFORCE++ with a baseline: reward minus the group's mean, whitened over the batch (arXiv:2501.03262)."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """Which algorithm."""


class Ppo(ReinforceFamily):
    """Proximal policy optimisation with a critic (Schulman et al. 2017, arXiv:1707.06347)."""

    baseline: ClassVar[Baseline] = "none"

    name: Literal["ppo"] = "ppo"
    """Which algorithm."""

    calculate_per_token_loss: bool = True
    """Average over all tokens of the step, for policy and critic."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Per-token discount factor. 1 suits finite responses."""

    lambd: Annotated[float, Field(ge=0, le=1)] = 0.95
    """GAE's lambda (arXiv:1506.02438). 1 uses only returns, 0 only the critic."""

    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """Clip range of a value around its value at the start of the round."""

    critic: Literal["separate", "shared"] = "separate"
    """separate: its own model and optimizer. shared: a value head on the policy's backbone, trained with it, in half
    the memory."""

    value_coef: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the value loss if the critic is shared."""

    critic_load: str | None = None
    """Model or critic to start the critic from. Default: the model that the run starts from."""

    critic_lr: Annotated[float, Field(ge=0)] = 1e-5
    """Constant learning rate of the critic. Its other optimizer settings are those in [train]."""

    num_critic_only_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first steps that train only the critic."""

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


class TurnGrpo(ComparedTurns):
    """GRPO per turn: normalised returns of turns (Ding et al. 2025, arXiv:2511.14846)."""

    name: Literal["turn_grpo"] = "turn_grpo"
    """Which algorithm."""

    turn_baseline: Literal["turn", "group", "batch"] = "turn"
    """Compare the return of a turn with turns of the same number in its group, with all turns of its group, or with
    all turns of the round."""

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs - ({Need.GROUPS} if self.turn_baseline == "batch" else set())


class Gigpo(ComparedTurns):
    """Group-in-group policy optimisation: attempts are compared, and turns from equal states (arXiv:2505.10978)."""

    name: Literal["gigpo"] = "gigpo"
    """Which algorithm."""

    turn_gamma: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Discount factor of the rewards of later turns."""

    step_reward_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the advantage among turns from the same state (omega)."""

    episode_reward_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the advantage of the whole attempt."""


class StepReinforce(TurnCredit):
    """REINFORCE per turn: discounted returns of turns, whitened over the round as in REINFORCE++ (arXiv:2501.03262)."""

    baseline: ClassVar[Baseline] = "none"

    name: Literal["step_reinforce"] = "step_reinforce"
    """Which algorithm."""

    normalize_advantages: bool = True
    """Whiten the advantages over all tokens of the round."""

    turn_gamma: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Discount factor of the rewards of later turns."""


class Opd(ClippedRatio):
    """On-policy distillation from a teacher, without rewards (Agarwal et al. 2023, arXiv:2306.13649)."""

    baseline: ClassVar[Baseline] = "none"
    learns_from_rewards: ClassVar[bool] = False

    name: Literal["opd"] = "opd"
    """Which algorithm."""

    calculate_per_token_loss: bool = True
    """Average over all tokens of the step."""

    opd_kl_coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the divergence from the teacher."""

    def conflicts(self, *, temperature: float) -> Iterator[str]:
        if self.kl_coef:
            yield (
                "algorithm.kl_coef has no effect with algorithm.name opd, which does not train on rewards. Use "
                "algorithm.kl_loss_coef."
            )
        if self.reward_clip:
            yield "algorithm.reward_clip has no effect with algorithm.name opd, which trains on no rewards. Drop it."
        yield from super().conflicts(temperature=temperature)


RolloutAlgorithm = (
    Grpo
    | DrGrpo
    | Dapo
    | Gspo
    | Cispo
    | Sapo
    | Gmpo
    | Topr
    | Rloo
    | Opo
    | MaxRl
    | Gdpo
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | Ppo
    | TurnGrpo
    | Gigpo
    | StepReinforce
    | Opd
)
"""Settings of any algorithm that learns from rollouts, in the order of docs/algorithms.md."""
