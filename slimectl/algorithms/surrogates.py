"""Surrogate objectives of policy gradients: one value per token, before any reduction.

To add a surrogate, write the function of its paper and a class in `SURROGATES` that passes it the algorithm's settings.

T tokens
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
LEVELS = ("token", "sequence", "geometric")


def check_tokens(function: str, **tensors: Tensor) -> None:
    """Raise ValueError unless the tensors are [T] of one length. Other shapes would silently broadcast to a wrong loss.

    >>> check_tokens("ppo_clip", logprobs_T=torch.zeros(2), advantages_T=torch.zeros(2, 1))
    Traceback (most recent call last):
    ValueError: ppo_clip: logprobs_T [2], advantages_T [2, 1]: must be one-dimensional and of equal length
    """
    shapes = [tensor.shape for tensor in tensors.values()]
    if any(len(shape) != 1 or shape != shapes[0] for shape in shapes):
        listed = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{function}: {listed}: must be one-dimensional and of equal length")


class TokenRows(NamedTuple):
    """The row of each token, and the tokens that count in it, for surrogates and weights of whole rows."""

    mask_T: Tensor
    row_T: Tensor
    rows: int


def ratio(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """Return exp(logp - old), the probability ratio of each token. [T].

    Schulman et al. 2017, arXiv:1707.06347, section 3. The log-ratio is clamped to ±20, because an infinite ratio times
    a zero weight would make the whole step NaN.
    """
    return torch.exp((logprobs_T - old_logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def ppo_clip(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> Tensor:
    """Return the clipped surrogate loss of each token, to be minimized. [T].

    Schulman et al. 2017, arXiv:1707.06347, eq. 7: max(-ratio A, -clip(ratio, 1 - low, 1 + high) A). `low` and `high`
    may differ (DAPO, arXiv:2503.14476, eq. 10): a wider upper bound lets rare tokens grow and slows entropy collapse.
    `dual` c bounds the loss of bad tokens whose ratio exploded (Ye et al. 2020, arXiv:1912.09729): where A < 0, the
    loss is min(that, -c A). Gradients flow through `logprobs_T` only, and not where the clipped branch is larger.

    Raises ValueError if `low` is not in (0, 1], `high` is not positive, or `dual` is not above 1.
    """
    unclipped_T, clipped_T = _branches(logprobs_T, old_logprobs_T, advantages_T, low=low, high=high)
    loss_T = torch.maximum(unclipped_T, clipped_T)
    if dual is None:
        return loss_T
    if dual <= 1:
        raise ValueError(f"dual is {dual}, but must be above 1")
    return torch.where(advantages_T < 0, torch.minimum(loss_T, -dual * advantages_T), loss_T)


def clip_fraction(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, *, low: float, high: float
) -> Tensor:
    """Return 1.0 for tokens where `ppo_clip` clips (its clipped branch is strictly larger), else 0.0. [T], no gradient.

    Schulman et al. 2017, arXiv:1707.06347, eq. 7. The dual clip does not count, because it bounds the loss and is not
    the trust region.
    """
    with torch.no_grad():
        unclipped_T, clipped_T = _branches(logprobs_T, old_logprobs_T, advantages_T, low=low, high=high)
        return (clipped_T > unclipped_T).to(logprobs_T.dtype)


def ratio_bound_metrics(ratio_T: Tensor, *, low: float, high: float) -> dict[str, Tensor]:
    """Return 1.0 for tokens whose ratio is above 1 + high, or below 1 - low, by metric name. Each [T], no gradient.

    Counts tokens of any advantage. `clip_fraction` counts only tokens whose gradient the bound stops
    (arXiv:1707.06347).
    """
    ratio_T = ratio_T.detach()
    return {
        "ratio_high_clipfrac": (ratio_T > 1 + high).to(ratio_T.dtype),
        "ratio_low_clipfrac": (ratio_T < 1 - low).to(ratio_T.dtype),
    }


def cispo_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return -stopgrad(clip(ratio, 1 - low, 1 + high)) A logp, to be minimized, and 1.0 where clipped. Each [T].

    CISPO, MiniMax 2025, arXiv:2506.13585, eq. 4: only the weight is clipped, so every token keeps its gradient.
    """
    check_tokens("cispo_loss", logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T)
    with torch.no_grad():
        ratio_T = ratio(logprobs_T, old_logprobs_T)
        weight_T = ratio_T.clamp(1 - low, 1 + high)
        clipped_T = (weight_T != ratio_T).to(logprobs_T.dtype)
    return -weight_T * advantages_T * logprobs_T, clipped_T


def sapo_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, *, tau_pos: float, tau_neg: float
) -> Tensor:
    """Return -(4 / tau) sigmoid(tau (ratio - 1)) A, to be minimized. [T].

    SAPO, Qwen 2025, arXiv:2511.20347: a gate that closes softly on either side of 1, where its slope is 1. `tau` is
    `tau_pos` for A > 0, else `tau_neg`. A larger value closes faster.
    """
    check_tokens("sapo_loss", logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T)
    tau_T = torch.full_like(advantages_T, tau_neg).masked_fill(advantages_T > 0, tau_pos)
    return -4 / tau_T * torch.sigmoid(tau_T * (ratio(logprobs_T, old_logprobs_T.detach()) - 1)) * advantages_T


def _branches(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    check_tokens("ppo_clip", logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T)
    if not 0 < low <= 1:
        raise ValueError(f"low is {low}, but must be in (0, 1]")
    if high <= 0:
        raise ValueError(f"high is {high}, but must be positive")
    ratio_T = ratio(logprobs_T, old_logprobs_T.detach())
    return -ratio_T * advantages_T, -ratio_T.clamp(1 - low, 1 + high) * advantages_T


def row_means(values_T: Tensor, token_rows: TokenRows) -> Tensor:
    """Return the mean over each row's unmasked tokens, at every token of the row. [T]. 0 for a fully masked row."""
    mask_T, row_T, rows = token_rows
    check_tokens("row_means", values_T=values_T, mask_T=mask_T, row_T=row_T)
    sums = values_T.new_zeros(rows).index_add(0, row_T, torch.where(mask_T, values_T, 0.0))
    counts = values_T.new_zeros(rows).index_add(0, row_T, mask_T.to(values_T.dtype))
    return (sums / counts.clamp(min=1))[row_T]


def level_ratio(logprobs_T: Tensor, old_T: Tensor, token_rows: TokenRows, level: str) -> Tensor:
    """Return exp(logp - old) of each token, its product over the row, or its geometric mean over the row. [T].

    Per token Schulman et al. 2017, arXiv:1707.06347, section 3. Per row Zheng et al. 2025, arXiv:2507.18071. Raises
    ValueError for a level that is not in LEVELS.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}. Available: {', '.join(LEVELS)}")
    raw_T = ratio(logprobs_T, old_T)
    if level == "token":
        return raw_T
    means_T = row_means(logprobs_T - old_T, token_rows)
    mask_T, row_T, rows = token_rows
    counts = raw_T.new_zeros(rows).index_add(0, row_T, mask_T.to(raw_T.dtype))[row_T]
    return ratio(means_T * counts if level == "sequence" else means_T, torch.zeros_like(means_T))


def topr_loss(
    logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, token_rows: TokenRows, *, level: str, high: float
) -> tuple[Tensor, Tensor]:
    """Return -A logp where A > 0, else -stopgrad(min(ratio, high)) A logp, and 1.0 where it is truncated. Each [T].

    TOPR, Le Roux et al. 2025, arXiv:2503.14286: good responses are imitated however unlikely they have become.
    The weight of a bad response vanishes as the policy leaves it, so that it cannot push the policy arbitrarily far.
    The paper uses the ratio of the whole response (level "sequence") and `high` is 1.
    """
    check_tokens("topr_loss", logprobs_T=logprobs_T, old_T=old_T, advantages_T=advantages_T)
    with torch.no_grad():
        ratio_T = level_ratio(logprobs_T, old_T, token_rows, level)
        is_bad_T = advantages_T < 0
        weight_T = torch.where(is_bad_T, ratio_T.clamp(max=high), torch.ones_like(ratio_T))
        truncated_T = (is_bad_T & (ratio_T > high)).to(logprobs_T.dtype)
    return -weight_T * advantages_T * logprobs_T, truncated_T


def gspo_logprobs(logprobs_T: Tensor, old_T: Tensor, token_rows: TokenRows) -> Tensor:
    """Return log-probabilities for `ppo_clip` whose ratio to `old_T` is the sequence-level ratio at each token. [T].

    GSPO, Zheng et al. 2025, arXiv:2507.18071, eq. 7: s = exp(mean(logp - old)), the length-normalized ratio.
    """
    old_T = old_T.detach()
    return old_T + row_means(logprobs_T - old_T, token_rows)


def gmpo_loss(
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    token_rows: TokenRows,
    *,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Return -A times the geometric mean of the clipped ratios, to be minimized, and 1.0 where clipped. Each [T].

    GMPO, Zhao et al. 2025, arXiv:2507.20673: bounds are on the log-ratio, [-low, high], and apply on the side
    to which the advantage pushes. Advantages must be equal within a row.
    """
    check_tokens("gmpo_loss", logprobs_T=logprobs_T, old_T=old_T, advantages_T=advantages_T)
    log_ratio_T = logprobs_T - old_T.detach()
    bounded_T = torch.where(advantages_T < 0, log_ratio_T.clamp(min=-low), log_ratio_T.clamp(max=high))
    clipped_T = ((bounded_T != log_ratio_T) & (advantages_T != 0)).to(logprobs_T.dtype)
    return -advantages_T * torch.exp(row_means(bounded_T, token_rows)), clipped_T


def opsm_mask(
    logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, token_rows: TokenRows, *, delta: float
) -> Tensor:
    """Return 0.0 for tokens of off-policy bad sequences (A < 0, mean(old - logp) > delta), else 1.0. [T], no gradient.

    Off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556.
    """
    distance_T = row_means((old_T - logprobs_T).detach(), token_rows)
    return 1.0 - ((advantages_T < 0) & (distance_T > delta)).to(logprobs_T.dtype)


@dataclass(frozen=True)
class Surrogate(ABC):
    """Surrogate of an algorithm. Its fields are the settings of the same names in the algorithm's section."""

    @abstractmethod
    def __call__(
        self, logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, token_rows: TokenRows
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, to be minimized, and 1.0 where it is clipped. Each [T]."""

    def policy_logprobs(self, logprobs_T: Tensor, old_T: Tensor, token_rows: TokenRows) -> Tensor:
        """Return the log-probabilities whose ratio to `old_T` the surrogate uses. [T]."""
        return logprobs_T

    @property
    def ratio_bounds(self) -> dict[str, float] | None:
        """Return the ratio bounds as arguments of `ratio_bound_metrics`, or None without bounds."""
        return None


@dataclass(frozen=True)
class BoundedSurrogate(Surrogate):
    """Surrogate with a bound on either side of its ratio, or of the logarithm of its ratio."""

    eps_clip: float = 0.2
    eps_clip_high: float | None = None

    @property
    def bounds(self) -> dict[str, float]:
        """Return the distances to the lower and the upper bound."""
        return {"low": self.eps_clip, "high": self.eps_clip if self.eps_clip_high is None else self.eps_clip_high}

    @property
    def ratio_bounds(self) -> dict[str, float] | None:
        return self.bounds


@dataclass(frozen=True)
class PpoClip(BoundedSurrogate):
    """The clipped surrogate of PPO and GRPO, `ppo_clip` (arXiv:1707.06347, eq. 7)."""

    eps_clip_c: float | None = None

    def __call__(
        self, logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, token_rows: TokenRows
    ) -> tuple[Tensor, Tensor]:
        loss_T = ppo_clip(logprobs_T, old_T, advantages_T, dual=self.eps_clip_c, **self.bounds)
        return loss_T, clip_fraction(logprobs_T, old_T, advantages_T, **self.bounds)


@dataclass(frozen=True)
class Gspo(PpoClip):
    """The clipped surrogate with one ratio per sequence, `gspo_logprobs` (arXiv:2507.18071, eq. 7)."""

    def policy_logprobs(self, logprobs_T: Tensor, old_T: Tensor, token_rows: TokenRows) -> Tensor:
        return gspo_logprobs(logprobs_T, old_T, token_rows)


@dataclass(frozen=True)
class Cispo(BoundedSurrogate):
    """The clipped weight of CISPO, `cispo_loss` (arXiv:2506.13585, eq. 4)."""

    def __call__(
        self, logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, token_rows: TokenRows
    ) -> tuple[Tensor, Tensor]:
        return cispo_loss(logprobs_T, old_T, advantages_T, **self.bounds)


@dataclass(frozen=True)
class Sapo(Surrogate):
    """The soft gate of SAPO, `sapo_loss` (arXiv:2511.20347). It clips nothing."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __call__(
        self, logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, token_rows: TokenRows
    ) -> tuple[Tensor, Tensor]:
        loss_T = sapo_loss(logprobs_T, old_T, advantages_T, tau_pos=self.tau_pos, tau_neg=self.tau_neg)
        return loss_T, torch.zeros_like(loss_T)


@dataclass(frozen=True)
class Gmpo(BoundedSurrogate):
    """The geometric mean of GMPO, `gmpo_loss` (arXiv:2507.20673). Its bounds are on the log-ratio."""

    def __call__(
        self, logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, token_rows: TokenRows
    ) -> tuple[Tensor, Tensor]:
        return gmpo_loss(logprobs_T, old_T, advantages_T, token_rows, **self.bounds)

    @property
    def ratio_bounds(self) -> dict[str, float]:
        return {"low": -math.expm1(-self.bounds["low"]), "high": math.expm1(self.bounds["high"])}


@dataclass(frozen=True)
class Topr(Surrogate):
    """The tapered weights of TOPR, `topr_loss` (arXiv:2503.14286), with a factor for good and for bad responses."""

    topr_level: str = "sequence"
    topr_clip: float = 1.0
    topr_positive_weight: float = 1.0
    topr_negative_weight: float = 1.0

    def __call__(
        self, logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, token_rows: TokenRows
    ) -> tuple[Tensor, Tensor]:
        loss_T, truncated_T = topr_loss(
            logprobs_T, old_T, advantages_T, token_rows, level=self.topr_level, high=self.topr_clip
        )
        factor_T = torch.full_like(loss_T, self.topr_positive_weight)
        factor_T = factor_T.masked_fill(advantages_T < 0, self.topr_negative_weight)
        return factor_T * loss_T, truncated_T


SURROGATES: dict[str, type[Surrogate]] = {
    "ppo_clip": PpoClip,
    "gspo": Gspo,
    "cispo": Cispo,
    "sapo": Sapo,
    "gmpo": Gmpo,
    "topr": Topr,
}
"""Surrogates by their name in an algorithm's settings."""
