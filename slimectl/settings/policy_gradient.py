"""Settings shared by the policy-gradient algorithms, and the conflicts between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slimectl.settings.base import Texts
from slimectl.settings.needs import AlgorithmSection, Baseline, Need, NormKind, Reduction
from slimectl.settings.teachers import Teacher, TeacherOptions, TeacherTable, template_conflicts


class PolicyGradient(AlgorithmSection):
    """Settings of every policy-gradient algorithm."""

    baseline: ClassVar[Baseline] = "group_mean"

    surrogate: ClassVar[str] = "ppo_clip"
    """Name of the surrogate loss (SURROGATES in algorithms/surrogates.py)."""

    learns_from_rewards: ClassVar[bool] = True
    """Whether rewards are used for training. If false, they are only reported."""

    name: str
    """Algorithm name."""

    drop_zero_std_groups: bool = False
    """Drop groups whose rewards are all equal (DAPO). The other groups then count more, and the step is larger."""

    calculate_per_token_loss: bool = False
    """Average over all tokens of the step, instead of over the mean of each rollout."""

    fixed_length: Annotated[int, Field(ge=1)] | None = None
    """Divide the sum of each rollout by this constant instead of its length (Dr. GRPO)."""

    reward_clip: Annotated[float, Field(gt=0)] | None = None
    """Bound of a reward in both directions, after it is compared with others. Default: none."""

    normalize_advantages: bool = False
    """Whiten the advantages over all tokens of the round."""

    advantage_clip: Annotated[float, Field(gt=0)] | None = None
    """Bound of a token's advantage in both directions, after whitening. Default: none."""

    max_len_mask: bool = False
    """Do not train on truncated responses. They still count in the baseline of their group (overlong filtering, DAPO,
    arXiv:2503.14476)."""

    difficulty_mask: bool = False
    """Do not train on groups whose mean reward is not between the two thresholds below."""

    difficulty_low_threshold: float = 0.1
    """Largest mean reward of a group that is too hard."""

    difficulty_high_threshold: float = 0.95
    """Smallest mean reward of a group that is too easy."""

    error_max_len_threshold: Annotated[int, Field(ge=1)] | None = None
    """Do not train on wrong responses of at least this many tokens: a reward below eval.success_threshold. Default:
    no limit."""

    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the reference in the reward, estimated by k1. It is per token if returns are per
    token, else summed over the response."""

    kl_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the reference in the loss."""

    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Estimator of the KL divergence in the loss."""

    use_unbiased_kl: bool = False
    """Weight the estimator by the importance ratio."""

    ref_load: str | None = None
    """Reference model. Default: the model that the run starts from."""

    ref_update_interval: Annotated[int, Field(ge=1)] | None = None
    """Replace the reference with the current policy every N rounds. Default: never."""

    opd_kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """On-policy distillation, in any algorithm: weight of the divergence from the teacher."""

    opd_divergence: Literal["token", "forward_kl", "reverse_kl", "jsd"] = "token"
    """Divergence from the teacher. token: log p(token) - log p_teacher(token) of the sampled tokens, subtracted from
    the advantages. The others compare distributions and are added to the loss: KL(teacher || policy), KL(policy ||
    teacher), or the generalized Jensen-Shannon divergence."""

    opd_jsd_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the teacher in the mixture of jsd (GKD, arXiv:2306.13649)."""

    opd_top_k: Annotated[int, Field(ge=1)] | None = None
    """Compare the distributions over the teacher's k likeliest tokens and one bucket for all others. Default: over the
    full vocabulary, which needs opd_teacher_load."""

    opd_teacher_load: str | None = None
    """Directory of the teacher, with the same vocabulary. opd_kl_coef needs this or opd_teacher_url, unless samples
    carry teacher_log_probs, or teacher_top_log_probs for opd_top_k."""

    opd_teacher_url: Texts = []
    """Teacher servers instead: SGLang, vLLM or `slimectl serve`. Requests alternate between them. If one does not
    answer, the others take over."""

    opd_teacher_api: Literal["sglang", "vllm"] = "sglang"
    """API of the servers in opd_teacher_url. `slimectl serve` uses sglang."""

    opd_teachers: dict[str, TeacherTable] = {}
    """Several teachers instead, each for some domains of prompts: NAME = {load or url, api, domains, weight}."""

    opd_self_teacher: Literal["current", "start"] | None = None
    """The policy is its own teacher, with its current weights or its weights at the start. It reads
    opd_teacher_template in place of the prompt."""

    opd_teacher_template: str | None = None
    """Text that a teacher reads in place of the prompt, or of the last user message of a chat. It may contain {prompt},
    {label}, {response}, {demonstration} (a successful response to the same prompt) and {metadata.KEY}. Samples
    that lack one of them are not distilled."""

    opd_self_success: float = 1.0
    """Reward from which a response is shown to its siblings as {demonstration}."""

    opd_align: Literal["vocabulary", "text"] = "vocabulary"
    """vocabulary: the teacher has the policy's vocabulary. text: tokens of another one are aligned by their text, which
    is approximate."""

    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus. 0 builds no entropy graph."""

    report_entropy: bool = True
    """Measure the entropy in every step. false saves its forward computation."""

    use_rollout_logprobs: bool = False
    """Use the engine's log-probabilities as the old policy's, instead of recomputing them."""

    use_tis: bool = False
    """Truncated importance sampling: correct for the difference between engine and trainer."""

    tis_clip: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of the importance weight."""

    tis_clip_low: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound of the importance weight."""

    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """Importance-weight level: per token, per response (product), or geometric mean over the response."""

    tis_mode: Literal["clip", "truncate", "mask"] = "clip"
    """Weights outside the bounds: clip at both bounds, clip only at the upper one, or mask (IcePop, 0.5 to 5,
    arXiv:2510.18855)."""

    tis_veto: Annotated[float, Field(gt=0)] | None = None
    """Mask a response that has a token with a weight below this (MIS: 1e-4). Default: off."""

    tis_batch_normalize: bool = False
    """Divide the weights by their mean over the step, so that the effective learning rate stays the same. Needs one
    more forward pass."""

    use_rs: bool = False
    """Rejection sampling (MIS): mask tokens or responses whose weight is outside rs_clip_low to rs_clip. Works with and
    without TIS."""

    rs_level: Literal["token", "sequence", "geometric"] = "geometric"
    """Weight level of the rejection, as in tis_level. With "token", single tokens are masked."""

    rs_clip: Annotated[float, Field(gt=0)] = 2.0
    """Largest accepted weight."""

    rs_clip_low: Annotated[float, Field(ge=0)] = 0.5
    """Smallest accepted weight."""

    use_opsm: bool = False
    """Off-policy sequence masking: mask negative-advantage responses that the policy has moved away from
    (arXiv:2512.02556)."""

    opsm_delta: Annotated[float, Field(ge=0)] = 1e-4
    """Threshold of that mask on mean(old - current log-probability)."""

    @property
    def needs_by_setting(self) -> dict[str, Need]:
        """Log-probabilities that the enabled settings need, by setting."""
        switches = {
            "kl_coef": (self.kl_coef, Need.REFERENCE),
            "kl_loss_coef": (self.kl_loss_coef, Need.REFERENCE),
            "opd_kl_coef": (self.opd_kl_coef and self.opd_divergence == "token", Need.TEACHER),
            "opd_top_k": (self.opd_kl_coef and self.opd_divergence != "token" and self.opd_top_k, Need.TEACHER_TOP),
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
        if "group" in self.norm_kinds if self.norm_kinds else self.baseline != "none":
            needs.add(Need.GROUPS)
        if self.kl_coef or Need.TEACHER in needs or self.tis_batch_normalize:
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
            self._teachers(),
            self.opd_kl_coef,
            self.opd_divergence,
            self.opd_top_k,
            self_teacher=self.opd_self_teacher,
            template=self.opd_teacher_template,
            success=self.opd_self_success,
            by_text=self.opd_align == "text",
        )

    @property
    def learns_from_teachers_samples(self) -> bool:
        return self.teacher_options is not None and self.opd_divergence != "token" and not self.learns_from_rewards

    def _teachers(self) -> tuple[Teacher, ...]:
        """Return the teachers of the table, or the only one."""
        table = "algorithm.opd_teachers"
        return tuple(
            Teacher(
                f"teacher/{name}", f"{table}.{name}.load", f"{table}.{name}.url", entry.load or None,
                tuple(entry.url), entry.api, tuple(entry.domains), entry.weight,
            )
            for name, entry in self.opd_teachers.items()
        ) or (
            Teacher(
                "teacher", "algorithm.opd_teacher_load", "algorithm.opd_teacher_url", self.opd_teacher_load,
                tuple(self.opd_teacher_url), self.opd_teacher_api,
            ),
        )  # fmt: skip

    def conflicts(self, *, temperature: float) -> Iterator[str]:
        if self.kl_coef and self.kl_loss_coef:
            yield (
                "algorithm.kl_coef and algorithm.kl_loss_coef cannot be combined: the divergence is part of either the "
                "reward or the loss. Set one to 0."
            )
        if self.calculate_per_token_loss and self.fixed_length:
            yield (
                "algorithm.calculate_per_token_loss and algorithm.fixed_length cannot be combined: both are "
                "reductions. Set only one."
            )
        if self.difficulty_low_threshold >= self.difficulty_high_threshold:
            yield (
                f"algorithm.difficulty_low_threshold: {self.difficulty_low_threshold:g} is not below "
                f"algorithm.difficulty_high_threshold: {self.difficulty_high_threshold:g}. Swap them."
            )
        if self.teacher_options is not None:
            yield from self.teacher_options.conflicts(temperature=temperature)
        if self.opd_teachers and (self.opd_teacher_load or self.opd_teacher_url):
            yield "algorithm.opd_teachers and a single teacher cannot be combined. Put that into the table."
        if self.opd_teacher_template is not None:
            yield from template_conflicts(self.opd_teacher_template)
        yield from self._correction_conflicts()

    def _correction_conflicts(self) -> Iterator[str]:
        for key in ("use_tis", "use_rs"):
            if self.use_rollout_logprobs and getattr(self, key):
                yield (
                    f"algorithm.use_rollout_logprobs and algorithm.{key} cannot be combined: with the engine's own "
                    f"log-probabilities there is nothing to correct. Drop one."
                )
        for kind in ("tis", "rs"):
            low, high = getattr(self, f"{kind}_clip_low"), getattr(self, f"{kind}_clip")
            if low > high:
                yield f"algorithm.{kind}_clip_low: {low:g} is above algorithm.{kind}_clip: {high:g}. Swap them."
        if self.tis_mode == "truncate" and self.tis_clip_low:
            yield (
                f"algorithm.tis_clip_low: {self.tis_clip_low:g} has no effect with algorithm.tis_mode = "
                f'"truncate", which uses only the upper bound. Set tis_mode = "clip", or drop it.'
            )


class RatioBounds(PolicyGradient):
    """Algorithms that bound the probability ratio around 1."""

    eps_clip: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower clip range: the gradient stops when the probability ratio falls below 1 - eps_clip."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = None
    """Upper clip range: the gradient stops above 1 + eps_clip_high. Default: eps_clip (DAPO: 0.28)."""


class ClippedRatio(RatioBounds):
    """Algorithms with a clipped ratio and optional dual clip."""

    eps_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: bound on the loss of negative-advantage tokens with a large ratio. Default: off."""


class NormalizedRewards(PolicyGradient):
    """Algorithms whose rewards can be normalized by a group, a round or all rounds."""

    norm_mean_type: NormKind | None = None
    """Mean to subtract from a reward instead of the algorithm's baseline: of its group, of the round (batch), of all
    rounds so far (running), or off. Default: the baseline, or off if norm_std_type is set."""

    norm_std_type: NormKind | None = None
    """Standard deviation to divide by, from the same choices. Equal rewards have none and are not divided. Default: as
    the baseline has it, or off if norm_mean_type is set."""

    @property
    def norm_kinds(self) -> tuple[NormKind, NormKind] | None:
        kinds = self.norm_mean_type, self.norm_std_type
        return (kinds[0] or "off", kinds[1] or "off") if any(kinds) else None


class GroupNormalized(NormalizedRewards):
    """Algorithms whose advantage is the reward normalised within its group."""

    grpo_std_normalization: bool = True
    """Divide by the group's standard deviation. false is Dr. GRPO (arXiv:2503.20783)."""

    @property
    def std_normalization(self) -> bool:
        return self.grpo_std_normalization


class TurnCredit(ClippedRatio):
    """Algorithms whose advantages come from the rewards of turns."""

    turn_gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount factor of the rewards of later turns."""

    outcome_weight: Annotated[float, Field(ge=0)] = 0.0
    """Add this times the reward of the attempt to its last turn, for example if a verifier grades the outcome. The
    rewards that environments give to turns include the outcome."""

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {Need.TURN_REWARDS}

    def conflicts(self, *, temperature: float) -> Iterator[str]:
        if self.drop_zero_std_groups:
            yield (
                f"algorithm.drop_zero_std_groups: groups of equal rewards still have turns that differ, and "
                f"algorithm.name {self.name} learns from them. Drop the key."
            )
        yield from super().conflicts(temperature=temperature)


class ComparedTurns(TurnCredit):
    """Algorithms that compare the returns of turns with each other."""

    grpo_std_normalization: bool = True
    """Divide by the standard deviation of the returns that are compared."""

    @property
    def std_normalization(self) -> bool:
        return self.grpo_std_normalization
