"""Measures and corrects the mismatch between engine and trainer log-probabilities (importance sampling, rejection).

T tokens. `old`: log-probabilities of the sampling policy, computed by the trainer; `rollout`: those of the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimectl.algorithms.surrogates import check_tokens, ratio, row_means

LEVELS = ("token", "sequence", "geometric")
MODES = ("clip", "truncate", "mask")


def importance_weights(
    old_T: Tensor,
    rollout_T: Tensor,
    mask_T: Tensor,
    row_T: Tensor,
    rows: int,
    *,
    level: str = "token",
    mode: str = "clip",
    low: float = 0.0,
    high: float = 2.0,
    veto: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return importance weights of the token losses, and 1.0 where bounds or veto changed them; each [T], constant.

    Truncated importance sampling: Ionides 2008, doi:10.1198/106186008X320456; for engine mismatch Yao et al. 2025,
    fengyao.notion.site/off-policy-rl. `level`: the ratio exp(old - rollout) of a token, its product over the row, or
    the geometric mean over the row, over tokens that `mask_T` keeps; log-weights are clamped to ±20. `mode`: clip
    clamps weights to [low, high], truncate to at most high, mask sets those outside to 0, which at token level is
    IcePop (Ling team 2025, arXiv:2510.18855). `veto` zeroes a whole sequence with a token ratio below it.

    Raises ValueError unless 0 <= low < high, and on another level or mode.
    """
    check_tokens("importance_weights", old_T=old_T, rollout_T=rollout_T, mask_T=mask_T, row_T=row_T)
    _check_bounds(low, high)
    if mode not in MODES:
        raise ValueError(f"no mode {mode!r}; there are {', '.join(MODES)}")
    old_T, rollout_T = old_T.detach(), rollout_T.detach()
    raw_T = _ratios(old_T, rollout_T, mask_T, row_T, rows, level)
    if mode == "mask":
        weights_T = torch.where((raw_T < low) | (raw_T > high), 0.0, raw_T)
    else:
        weights_T = raw_T.clamp(low if mode == "clip" else 0.0, high)
    if veto is not None:
        vetoed_T = (ratio(old_T, rollout_T) < veto) & mask_T
        weights_T = torch.where(row_means(vetoed_T.to(raw_T.dtype), mask_T, row_T, rows) > 0, 0.0, weights_T)
    return weights_T, (weights_T != raw_T).to(old_T.dtype)


def rejection_mask(
    old_T: Tensor, rollout_T: Tensor, mask_T: Tensor, row_T: Tensor, rows: int, *, level: str, low: float, high: float
) -> Tensor:
    """Return 1.0 where the weight of `level` lies within [low, high], else 0.0; [T], constant.

    Rejection of masked importance sampling: Liu, Li et al. 2025, "When Speed Kills Stability". Level "token" rejects
    single tokens; "sequence" and "geometric" reject whole rows.

    Raises ValueError unless 0 <= low < high, and on another level.
    """
    check_tokens("rejection_mask", old_T=old_T, rollout_T=rollout_T, mask_T=mask_T, row_T=row_T)
    _check_bounds(low, high)
    raw_T = _ratios(old_T.detach(), rollout_T.detach(), mask_T, row_T, rows, level)
    return ((raw_T >= low) & (raw_T <= high)).to(old_T.dtype)


def self_normalization(weights_T: Tensor, mask_T: Tensor, row_T: Tensor, rows: int, *, level: str) -> float:
    """Return the mean weight of a whole step, by which the weights are divided: over tokens, or rows at other levels.

    The self-normalised estimate of importance sampling (Owen 2013, artowen.su.domains/mc, section 9.2), over tokens and
    rows that `mask_T` keeps. 1 if the mean is 0.
    """
    masked_weights = weights_T[mask_T]
    if level != "token":
        # All tokens of a row have the same weight: keep one per row.
        masked_weights = torch.full((rows,), torch.nan, dtype=masked_weights.dtype).index_put(
            (row_T[mask_T],), masked_weights
        )
        masked_weights = masked_weights[~masked_weights.isnan()]
    mean = float(masked_weights.mean()) if len(masked_weights) else 0.0
    return mean or 1.0


def _ratios(old_T: Tensor, rollout_T: Tensor, mask_T: Tensor, row_T: Tensor, rows: int, level: str) -> Tensor:
    """Return exp(old - rollout) of each token, or of its row; [T]."""
    if level not in LEVELS:
        raise ValueError(f"no level {level!r}; there are {', '.join(LEVELS)}")
    raw_T = ratio(old_T, rollout_T)
    if level == "token":
        return raw_T
    means_T = row_means(old_T - rollout_T, mask_T, row_T, rows)
    counts = raw_T.new_zeros(rows).index_add(0, row_T, mask_T.to(raw_T.dtype))[row_T]
    return ratio(means_T * counts if level == "sequence" else means_T, torch.zeros_like(means_T))


def engine_mismatch_metrics(old_T: Tensor, rollout_T: Tensor) -> dict[str, Tensor]:
    """Return mismatch metrics by name; each [T], constant, to be reduced with the token weights.

    With w = exp(old - rollout), its logarithm clamped to ±20: |old - rollout|, w before truncation, and two estimates
    of KL(engine || trainer), whose tokens the engine sampled: k1 = -log w and k3 = w - 1 - log w (Schulman 2020,
    joschu.net/blog/kl-approx.html).
    """
    log_weights_T = old_T.detach() - rollout_T.detach()
    weights_T = ratio(old_T.detach(), rollout_T.detach())
    return {
        "train_rollout_logprob_abs_diff": log_weights_T.abs(),
        "tis": weights_T,
        "train_rollout_k1": -log_weights_T,
        "train_rollout_k3": weights_T - 1 - torch.log(weights_T),
    }


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ValueError(f"low is {low} and high {high}, must be 0 <= low < high")
