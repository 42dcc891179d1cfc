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
    """Servers that have the teacher instead, asked in turn: SGLang's, or `slimectl serve`."""

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


class Bounded(PolicyGradient):
    """Algorithms that bound the probability ratio around 1."""

    eps_clip: Annotated[float, Field(gt=0, le=1)] = 0.2
    """How far the probability ratio may fall below 1 before its gradient stops."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = None
    """How far it may rise above 1; eps_clip where not given (DAPO: 0.28)."""


class Clipped(Bounded):
    """Algorithms with a clipped ratio and optional dual clip."""

    eps_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: bound on the loss of bad tokens whose ratio exploded; off where not given."""


class GroupNormalized(PolicyGradient):
    """Algorithms whose advantage is the reward normalised within its group."""

    grpo_std_normalization: bool = True
    """Divide by the group's standard deviation; off is Dr. GRPO (arXiv:2503.20783)."""
