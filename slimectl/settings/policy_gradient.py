"""Settings shared by the policy-gradient algorithms."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slimectl.settings.base import Section, Texts

Baseline = Literal["group_mean", "leave_one_out", "length_weighted", "mean_normalized", "none"]
Surrogate = Literal["ppo_clip", "gspo", "cispo", "sapo", "gmpo"]


class PolicyGradient(Section):
    """Settings of every policy-gradient algorithm."""

    baseline: ClassVar[Baseline] = "group_mean"
    """What a reward is compared with; with "none" a prompt needs no second answer."""

    surrogate: ClassVar[Surrogate] = "ppo_clip"
    """What is minimised with the advantages."""

    name: str
    """Which algorithm."""

    drop_zero_std_groups: bool = True
    """Leave out groups whose rewards are all equal: they carry no signal, only weight in the mean."""

    calculate_per_token_loss: bool = False
    """Mean over all tokens of the step rather than over rollouts of each one's mean."""

    fixed_length: Annotated[int, Field(ge=1)] | None = None
    """Divide each rollout's sum by this constant instead of its own length (Dr. GRPO)."""

    normalize_advantages: bool = False
    """Whiten the advantages over all tokens of the round."""

    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the reference in the reward: each token's own where returns are by token, else the
    sum over the answer. The estimator is k1."""

    kl_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the reference in the loss."""

    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Estimator of the divergence in the loss."""

    use_unbiased_kl: bool = False
    """Weight the estimator by the importance ratio."""

    ref_load: str | None = None
    """Model to measure the divergence from; the one that the run starts from where not given."""

    ref_update_interval: Annotated[int, Field(ge=1)] | None = None
    """Rounds after which the reference becomes the policy of then, in a run; never where not given."""

    opd_kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """On-policy distillation: times log p(token) - log p_teacher(token), off each advantage of any algorithm."""

    opd_teacher_load: str | None = None
    """The teacher's model directory, of the same vocabulary; this or opd_teacher_url is needed with opd_kl_coef unless
    samples carry teacher_log_probs."""

    opd_teacher_url: Texts = []
    """Servers that have the teacher instead, asked in turn: SGLang's, vLLM's, or `slimectl serve`."""

    opd_teacher_api: Literal["sglang", "vllm"] = "sglang"
    """API that the servers of opd_teacher_url speak; `slimectl serve` speaks sglang."""

    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus; 0 builds no entropy graph."""

    report_entropy: bool = True
    """Measure the entropy in every step; off saves the forward half of computing it."""

    use_rollout_logprobs: bool = False
    """Take the engine's log-probabilities as those of the old policy instead of recomputing them."""

    use_tis: bool = False
    """Truncated importance sampling: correct for engine and trainer disagreeing."""

    tis_clip: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of that weight."""

    tis_clip_low: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound of that weight."""

    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """Whose weight: a token's own, the product over its answer, or that product's geometric mean."""

    tis_mode: Literal["clip", "truncate", "mask"] = "clip"
    """Beyond the bounds: hold it there, hold the upper one only, or leave out (IcePop, 0.5 to 5: arXiv:2510.18855)."""

    tis_veto: Annotated[float, Field(gt=0)] | None = None
    """Leave out an answer with a token whose own weight is below this (MIS: 1e-4); off where not given."""

    tis_batch_normalize: bool = False
    """Divide the weights by their mean over the step, so that they move no learning rate; one more forward pass."""

    use_rs: bool = False
    """Rejection: leave out tokens or answers whose weight is out of bounds of its own (MIS), beside or without TIS."""

    rs_level: Literal["token", "sequence", "geometric"] = "geometric"
    """Whose weight is looked at, as in tis_level; with "token" a token is left out alone."""

    rs_clip: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight that is kept."""

    rs_clip_low: Annotated[float, Field(ge=0)] = 0.5
    """Smallest weight that is kept."""

    use_opsm: bool = False
    """Off-policy sequence masking: leave bad answers alone that the policy has left already (arXiv:2512.02556)."""

    opsm_delta: Annotated[float, Field(ge=0)] = 1e-4
    """How far, as mean(old - present log-probability), before it does."""


class RatioBounds(PolicyGradient):
    """Algorithms that bound the probability ratio around 1."""

    eps_clip: Annotated[float, Field(gt=0, le=1)] = 0.2
    """How far the probability ratio may fall below 1 before its gradient stops."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = None
    """How far it may rise above 1; eps_clip where not given (DAPO: 0.28)."""


class ClippedRatio(RatioBounds):
    """Algorithms with a clipped ratio and optional dual clip."""

    eps_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: bound on the loss of bad tokens whose ratio exploded; off where not given."""


class GroupNormalized(PolicyGradient):
    """Algorithms whose advantage is the reward normalised within its group."""

    grpo_std_normalization: bool = True
    """Divide by the group's standard deviation; off is Dr. GRPO (arXiv:2503.20783)."""


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

    eps_clip_high: Annotated[float, Field(gt=0)] | None = 0.28
    """How far it may rise above 1: wider than it may fall, so that rare tokens can grow."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step, so that a token of a long answer counts as much as one of a short answer."""


class Gspo(GroupNormalized, ClippedRatio):
    """Group sequence policy optimisation: one ratio per answer (Zheng et al. 2025, arXiv:2507.18071)."""

    surrogate: ClassVar[Surrogate] = "gspo"

    name: Literal["gspo"] = "gspo"
    """Which algorithm."""

    eps_clip: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """How far the ratio of an answer, a mean over its tokens, may fall below 1 before its gradient stops."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = 4e-4
    """How far it may rise above 1; eps_clip where not given."""


class Cispo(GroupNormalized, RatioBounds):
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


class Gmpo(GroupNormalized, RatioBounds):
    """Geometric-mean policy optimisation (Zhao et al. 2025, arXiv:2507.20673)."""

    surrogate: ClassVar[Surrogate] = "gmpo"

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


class ReinforcePlusPlus(ReinforceFamily):
    """Returns of every token, whitened over the batch instead of a group (Hu et al. 2025, arXiv:2501.03262)."""

    baseline: ClassVar[Baseline] = "none"

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """Which algorithm."""

    drop_zero_std_groups: bool = False
    """Leave out groups whose rewards are all equal; here they count, as no group is compared within itself."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward for each token before it."""


class ReinforcePlusPlusBaseline(ReinforceFamily):
    """REINFORCE++ with a baseline: reward less the group's mean, whitened over the batch (arXiv:2501.03262)."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """Which algorithm."""

    drop_zero_std_groups: bool = False
    """Leave out groups whose rewards are all equal; here they count in the scale of the batch."""


class Ppo(ReinforceFamily):
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


def critic_is_shared(algorithm: Section) -> bool:
    """Whether policy and critic share one model."""
    return isinstance(algorithm, Ppo) and algorithm.critic == "shared"


class Opd(ClippedRatio):
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
