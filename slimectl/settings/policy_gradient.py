"""Settings shared by the policy-gradient algorithms, and the conflicts between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slimectl.redaction import REFERENCES
from slimectl.settings.base import Texts
from slimectl.settings.needs import AlgorithmSection, Baseline, Need, Reduction, TeacherOptions


class PolicyGradient(AlgorithmSection):
    """Settings of every policy-gradient algorithm."""

    baseline: ClassVar[Baseline] = "group_mean"

    surrogate: ClassVar[str] = "ppo_clip"
    """Name of the surrogate that is minimised (SURROGATES in algorithms/surrogates.py)."""

    learns_from_rewards: ClassVar[bool] = True
    """Off if rewards are reported and nothing else."""

    name: str
    """Which algorithm."""

    drop_zero_std_groups: bool = False
    """Leave out groups whose rewards are all equal (DAPO): the others then weigh more, and the step is larger."""

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
    """Servers that have the teacher instead, asked in turn: SGLang's, vLLM's, or `slimectl serve`. Where one does not
    answer, the others are asked."""

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

    @property
    def needs_by_setting(self) -> dict[str, Need]:
        """Log-probabilities that switched-on settings need, by setting."""
        switches = {
            "kl_coef": (self.kl_coef, Need.REFERENCE),
            "kl_loss_coef": (self.kl_loss_coef, Need.REFERENCE),
            "opd_kl_coef": (self.opd_kl_coef, Need.TEACHER),
            "use_tis": (self.use_tis, Need.ROLLOUT_LOG_PROBS),
            "use_rs": (self.use_rs, Need.ROLLOUT_LOG_PROBS),
            "use_rollout_logprobs": (self.use_rollout_logprobs, Need.ROLLOUT_LOG_PROBS),
        }
        return {f"algorithm.{key}": need for key, (switch, need) in switches.items() if switch}

    @property
    def needs(self) -> frozenset[Need]:
        needs = set(self.needs_by_setting.values())
        if self.learns_from_rewards:
            needs.add(Need.REWARDS)
        if self.baseline != "none":
            needs.add(Need.GROUPS)
        if self.kl_coef or self.opd_kl_coef or self.tis_batch_normalize:
            needs.add(Need.OLD_LOG_PROBS)
        return frozenset(needs)

    @property
    def reduction(self) -> tuple[Reduction, int | None]:
        if self.calculate_per_token_loss:
            return "per_token", None
        return ("fixed_length", self.fixed_length) if self.fixed_length else ("rollout_mean", None)

    @property
    def whitens_advantages(self) -> bool:
        return self.normalize_advantages

    @property
    def reference_load(self) -> str | None:
        return self.ref_load

    @property
    def reference_interval(self) -> int | None:
        return self.ref_update_interval

    @property
    def teacher_options(self) -> TeacherOptions | None:
        if not self.opd_kl_coef:
            return None
        return TeacherOptions(
            self.opd_teacher_load, tuple(self.opd_teacher_url), self.opd_teacher_api, self.opd_kl_coef
        )

    def conflicts(self, *, temperature: float) -> Iterator[str]:
        if self.kl_coef and self.kl_loss_coef:
            yield (
                "algorithm.kl_coef and algorithm.kl_loss_coef exclude each other: the divergence goes into the reward "
                "or into the loss; set one to 0"
            )
        if self.calculate_per_token_loss and self.fixed_length:
            yield "algorithm.calculate_per_token_loss and algorithm.fixed_length are two reductions; give one of them"
        yield from self._teacher_conflicts(temperature)
        yield from self._correction_conflicts()

    def _teacher_conflicts(self, temperature: float) -> Iterator[str]:
        urls = self.opd_teacher_url
        if urls and self.opd_teacher_load:
            yield "algorithm.opd_teacher_load and algorithm.opd_teacher_url are two teachers; give one of them"
        if urls and temperature != 1.0:
            yield (
                f"algorithm.opd_teacher_url and rollout.temperature: {temperature:g} exclude each other: servers tell "
                f"the probabilities of temperature 1; set that, or give algorithm.opd_teacher_load"
            )
        for url in urls:
            if not url.startswith(("http://", "https://", *REFERENCES)):
                yield f"algorithm.opd_teacher_url: {url!r} is no address; write http://HOST:PORT"

    def _correction_conflicts(self) -> Iterator[str]:
        for key in ("use_tis", "use_rs"):
            if self.use_rollout_logprobs and getattr(self, key):
                yield (
                    f"algorithm.use_rollout_logprobs and algorithm.{key} exclude each other: with the engine's own "
                    f"log-probabilities there is nothing to correct; drop one"
                )
        for kind in ("tis", "rs"):
            low, high = getattr(self, f"{kind}_clip_low"), getattr(self, f"{kind}_clip")
            if low > high:
                yield f"algorithm.{kind}_clip_low: {low:g} is above algorithm.{kind}_clip: {high:g}; swap them"
        if self.tis_mode == "truncate" and self.tis_clip_low:
            yield (
                f"algorithm.tis_clip_low: {self.tis_clip_low:g} has no effect with algorithm.tis_mode = "
                f'"truncate", which holds the upper bound only; set tis_mode = "clip" or drop it'
            )


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

    @property
    def std_normalization(self) -> bool:
        return self.grpo_std_normalization
