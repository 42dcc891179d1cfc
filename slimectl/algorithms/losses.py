"""Losses of whole packs: combines surrogate, KL divergence, entropy and importance sampling, and reduces them.

T tokens. A loss is a frozen picklable value, so that it can be sent to every rank. Everything that it returns is a sum
over the pack's tokens with `weights_T` applied, so packs, micro-batches and ranks add up. The weights of a step
normally sum to 1, which gives a mean. They do not if whole samples were masked or the reduction is by a fixed length
(see reductions.py). pg_loss, kl_loss and entropy_loss then carry that factor, like the loss that they add up to. All
other metrics are means. A metric whose name ends in _max or _min is combined over packs as a maximum or minimum.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slimectl.algorithms.distillation import Divergence
from slimectl.algorithms.importance_sampling import engine_mismatch_metrics, importance_weights, rejection_mask
from slimectl.algorithms.kl import approx_kl_metrics, kl_estimate, unbiased_kl_estimate
from slimectl.algorithms.surrogates import PpoClip, Surrogate, TokenRows, opsm_mask, ratio_bound_metrics
from slimectl.errors import SettingsError
from slimectl.types import Loss, TokenBatch

PARTS = ("pg_loss", "kl_loss", "entropy_loss", "sft_loss", "positive_sft_loss", "negative_sft_loss")
"""Metrics that are reduced like the loss: its terms, and the loss that sft would have."""


@dataclass(frozen=True)
class PolicyLoss:
    """Policy gradient loss: pg_loss + kl_loss_coef * kl_loss + opd_kl_coef * opd_kl - entropy_coef * entropy_loss.

    pg_loss comes from the `surrogate`: the clipped loss of PPO and GRPO, or another one of surrogates.py.

    Schulman et al. 2017, arXiv:1707.06347, eq. 9. GRPO, arXiv:2402.03300, eq. 3. If the pack has no `old_logprobs_T`,
    the current policy is the sampling policy: the ratio is 1 and the gradient is A grad logp.

    Metrics:
    - pg_loss (after the correction), pg_clipfrac, and the metrics of `approx_kl_metrics` and `ratio_bound_metrics`
    - ratio_max and ratio_min (gspo uses the ratio of the sequence)
    - sft_loss, the negative log-probability, and with rewards its parts positive_sft_loss (rewards above 0) and
      negative_sft_loss
    - with a reference, kl_loss
    - with a teacher whose distributions are compared, opd_kl, the mean divergence
    - with entropy, entropy_loss and its sum over tokens, token_entropy
    - with rollout log-probabilities, tis_clipfrac (whether or not the weights are applied), tis_masked (tokens zeroed
      by TIS and rejection), the metrics of `engine_mismatch_metrics`, and the maximum tis_max

    `tis_scale` is 1 over the step's mean weight if weights are normalized (importance_sampling.self_normalization).
    `report_scale` is 1 over the sum of the step's `weights_T`. The loss is the first element of the returned pair and
    is not repeated among the metrics.

    Raises SettingsError if the pack lacks a column that a coefficient needs.
    """

    surrogate: Surrogate = field(default_factory=PpoClip)
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k1"
    use_unbiased_kl: bool = False
    opd_kl_coef: float = 0.0
    opd_divergence: str = "token"
    opd_jsd_beta: float = 0.5
    entropy_coef: float = 0.0
    use_rollout_logprobs: bool = False
    use_tis: bool = False
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    tis_level: str = "token"
    tis_mode: str = "clip"
    tis_veto: float | None = None
    tis_scale: float = 1.0
    use_rs: bool = False
    rs_level: str = "geometric"
    rs_clip: float = 2.0
    rs_clip_low: float = 0.5
    use_opsm: bool = False
    opsm_delta: float = 1e-4
    report_entropy: bool = False
    report_scale: float = 1.0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0 or self.report_entropy

    @property
    def divergence(self) -> Divergence | None:
        """The divergence from a teacher as a term of the loss, or None. In token mode it is part of the advantages."""
        if not self.opd_kl_coef or self.opd_divergence == "token":
            return None
        return Divergence(self.opd_divergence, self.opd_jsd_beta)  # type: ignore[arg-type]

    def __call__(self, pack: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        weights_T = pack.weights_T
        loss_T, values_T = self._surrogate(pack)
        pg_T = values_T["pg_loss"] = loss_T
        if (kl_T := self._divergence(pack)) is not None:
            values_T["kl_loss"] = kl_T
            if self.kl_loss_coef:
                loss_T = loss_T + self.kl_loss_coef * kl_T
        if self.divergence is not None:
            loss_T = loss_T + self.opd_kl_coef * self._distillation(pack, values_T)
        if (entropy_T := self._entropy(pack)) is not None:
            values_T["entropy_loss"] = entropy_T
            if self.entropy_coef:
                loss_T = loss_T - self.entropy_coef * entropy_T
        values_T |= _imitation(pack)
        metrics = {name: self._weighted_sum(pack, name, value_T.detach()) for name, value_T in values_T.items()}
        metrics = {name: value * (1.0 if name in PARTS else self.report_scale) for name, value in metrics.items()}
        mask_T = weights_T != 0
        if bool(mask_T.any()) if pack.has_weight is None else pack.has_weight:
            # Use masks instead of selecting tokens: on a GPU, a selection waits for the number of tokens.
            metrics |= {
                "ratio_max": _largest(values_T["ois"], mask_T),
                "ratio_min": -_largest(-values_T["ois"], mask_T),
            }
            if entropy_T is not None:
                metrics["token_entropy"] = torch.where(mask_T, entropy_T.detach(), 0.0).sum()
            if "tis" in values_T:
                metrics["tis_max"] = _largest(values_T["tis"], mask_T)
        return self._total(pack, pg_T, loss_T), metrics

    def _weighted_sum(self, pack: TokenBatch, name: str, values_T: Tensor) -> Tensor:
        """Return the weighted sum of `values_T` over the pack. Sums over packs can be added."""
        return (pack.weights_T * values_T).sum()

    def _total(self, pack: TokenBatch, pg_T: Tensor, loss_T: Tensor) -> Tensor:
        """Return the loss to minimize, from the policy term `pg_T` and the total `loss_T` of each token."""
        return self._weighted_sum(pack, "loss", loss_T)

    def _surrogate(self, pack: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the corrected surrogate of each token, and its metrics."""
        if pack.advantages_T is None:
            raise SettingsError("a policy loss needs advantages, which these samples lack. Score them first.")
        old_T, advantages_T = _old_logprobs(pack), pack.advantages_T
        token_rows = TokenRows(pack.weights_T != 0, pack.row_T, pack.rows)
        logprobs_T = self.surrogate.policy_logprobs(pack.logprobs_T, old_T, token_rows)
        loss_T, clipped_T = self.surrogate(logprobs_T, old_T, advantages_T, token_rows)
        values_T = {"pg_clipfrac": clipped_T} | approx_kl_metrics(logprobs_T, old_T)
        if (bounds := self.surrogate.ratio_bounds) is not None:
            values_T |= ratio_bound_metrics(values_T["ois"], **bounds)
        if pack.rollout_logprobs_T is not None:
            trainer_T = pack.logprobs_T if self.use_rollout_logprobs else old_T
            values_T |= engine_mismatch_metrics(trainer_T, pack.rollout_logprobs_T)
            correction_T, values_T["tis_clipfrac"] = self._correction(pack, old_T, pack.rollout_logprobs_T)
            loss_T = loss_T * correction_T
            values_T["tis_masked"] = (correction_T == 0).to(loss_T.dtype)
        elif self.use_tis or self.use_rs:
            name = "use_tis" if self.use_tis else "use_rs"
            raise SettingsError(f"algorithm.{name} needs rollout_log_probs, which these samples lack. Turn it off.")
        if self.use_opsm:
            kept_T = opsm_mask(pack.logprobs_T, old_T, advantages_T, token_rows, delta=self.opsm_delta)
            loss_T, values_T["opsm_clipfrac"] = loss_T * kept_T, 1.0 - kept_T
        return loss_T, values_T

    def _correction(self, pack: TokenBatch, old_T: Tensor, rollout_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factor of each token's loss (1 without TIS and rejection), and where TIS would change a weight."""
        inputs = (old_T, rollout_T, TokenRows(pack.weights_T != 0, pack.row_T, pack.rows))
        weights_T, changed_T = importance_weights(
            *inputs,
            level=self.tis_level,
            mode=self.tis_mode,
            low=self.tis_clip_low,
            high=self.tis_clip,
            veto=self.tis_veto,
        )
        factor_T = weights_T * self.tis_scale if self.use_tis else torch.ones_like(weights_T)
        if self.use_rs:
            kept_T = rejection_mask(*inputs, level=self.rs_level, low=self.rs_clip_low, high=self.rs_clip)
            factor_T = factor_T * kept_T
        return factor_T, changed_T

    def _divergence(self, pack: TokenBatch) -> Tensor | None:
        """Return the KL estimate of each token, or None without a reference. Has gradients only if the loss uses it."""
        if pack.ref_logprobs_T is None:
            if self.kl_loss_coef:
                raise SettingsError(
                    "algorithm.kl_loss_coef needs ref_log_probs, which these samples lack. Set it to 0."
                )
            return None
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.kl_loss_coef != 0):
            if self.use_unbiased_kl:
                return unbiased_kl_estimate(
                    pack.logprobs_T, pack.ref_logprobs_T, _old_logprobs(pack), self.kl_loss_type
                )
            return kl_estimate(pack.logprobs_T, pack.ref_logprobs_T, self.kl_loss_type)

    def _distillation(self, pack: TokenBatch, values_T: dict[str, Tensor]) -> Tensor:
        """Return the divergence of each token from the teacher, times the row's weight, and add its metric.

        GKD, Agarwal et al. 2023, arXiv:2306.13649. The gradient flows through the distributions, not through the
        probability of the sampled tokens, and no importance weight applies.
        """
        if pack.divergence_T is None:
            raise SettingsError(
                "algorithm.opd_divergence: this trainer does not compare distributions. Set it to token."
            )
        values_T["opd_kl"] = pack.divergence_T
        return pack.divergence_T if pack.teacher_weights_T is None else pack.divergence_T * pack.teacher_weights_T

    def _entropy(self, pack: TokenBatch) -> Tensor | None:
        if pack.entropy_T is None and self.needs_entropy:
            raise ValueError("the pack has no entropy_T although needs_entropy is true")
        return pack.entropy_T


@dataclass(frozen=True)
class WatchedLoss:
    """A user's loss, with the metrics that PolicyLoss computes from log-probabilities.

    The user's loss replaces pg_loss. Its metrics replace metrics of the same name. The entropy is measured for the
    metrics if that needs no gradient. The user's loss receives it only if it needs it.
    """

    loss: Loss
    watch: PolicyLoss

    @property
    def needs_entropy(self) -> bool:
        return self.loss.needs_entropy or (self.watch.report_entropy and not self.needs_logits)

    @property
    def needs_logits(self) -> bool:
        return bool(getattr(self.loss, "needs_logits", False))

    def __call__(self, pack: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        entropy_T = pack.entropy_T if self.loss.needs_entropy else None
        loss, metrics = self.loss(dataclasses.replace(pack, entropy_T=entropy_T))
        if pack.advantages_T is None:
            return loss, metrics
        # The user's loss lacks these terms, so their columns may be missing.
        watch = dataclasses.replace(
            self.watch,
            use_tis=False,
            use_rs=False,
            kl_loss_coef=0.0,
            opd_kl_coef=0.0,
            entropy_coef=0.0,
            report_entropy=False,
        )
        with torch.no_grad():
            _, watched = watch(dataclasses.replace(pack, logprobs_T=pack.logprobs_T.detach()))
        del watched["pg_loss"]
        return loss, watched | metrics


@dataclass(frozen=True)
class SftLoss:
    """Mean negative log-probability of the unmasked tokens. The metric sft_loss has the same value.

    Supervised fine-tuning: Ouyang et al. 2022, arXiv:2203.02155, section 3.5.
    """

    @property
    def needs_entropy(self) -> bool:
        return False

    def __call__(self, pack: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -(pack.weights_T * pack.logprobs_T).sum()
        return loss, {"sft_loss": loss.detach()}


def _largest(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the largest value of the tokens in the mask."""
    return values_T.masked_fill(~mask_T, -torch.inf).max()


def _imitation(pack: TokenBatch) -> dict[str, Tensor]:
    """Return the negative log-probability of each token by metric: all responses, good ones, and the others.

    These are the losses of imitating each kind (TOPR, arXiv:2503.14286, treats the two separately).
    """
    nll_T = -pack.logprobs_T.detach()
    values_T = {"sft_loss": nll_T}
    if pack.rewards_T is not None:
        good_T = pack.rewards_T > 0
        values_T |= {"positive_sft_loss": nll_T * good_T, "negative_sft_loss": nll_T * ~good_T}
    return values_T


def _old_logprobs(pack: TokenBatch) -> Tensor:
    """Return the sampling policy's log-probabilities without gradient, or the current ones if none were recorded."""
    return (pack.logprobs_T if pack.old_logprobs_T is None else pack.old_logprobs_T).detach()
