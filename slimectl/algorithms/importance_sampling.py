"""Measures and corrects the mismatch between engine and trainer log-probabilities (importance sampling, rejection).

T tokens. `old`: log-probabilities of the sampling policy, computed by the trainer. `rollout`: computed by the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimectl.algorithms.surrogates import TokenRows, check_tokens, level_ratio, ratio, row_means

MODES = ("clip", "truncate", "mask")


def importance_weights(
    old_T: Tensor,
    rollout_T: Tensor,
    token_rows: TokenRows,
    *,
    level: str = "token",
    mode: str = "clip",
    low: float = 0.0,
    high: float = 2.0,
    veto: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return importance weights of the token losses, and 1.0 where bounds or veto changed them. Each [T], no gradient.

    Truncated importance sampling: Ionides 2008, doi:10.1198/106186008X320456. For engine mismatch: Yao et al. 2025,
    fengyao.notion.site/off-policy-rl. `level` selects the ratio exp(old - rollout) of a token, its product over the
    row, or its geometric mean over the row, using only tokens that `mask_T` keeps. Log-weights are clamped to ±20.
    `mode`: clip clamps weights to [low, high], truncate to at most high. mask sets weights outside the range to 0,
    which at token level is IcePop (Ling team 2025, arXiv:2510.18855). `veto` zeroes any sequence that has a token
    ratio below it.

    Raises ValueError unless 0 <= low < high, and for an unknown level or mode.
    """
    check_tokens(
        "importance_weights", old_T=old_T, rollout_T=rollout_T, mask_T=token_rows.mask_T, row_T=token_rows.row_T
    )
    _check_bounds(low, high)
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}. Available: {', '.join(MODES)}")
    old_T, rollout_T = old_T.detach(), rollout_T.detach()
    raw_T = level_ratio(old_T, rollout_T, token_rows, level)
    if mode == "mask":
        weights_T = torch.where((raw_T < low) | (raw_T > high), 0.0, raw_T)
    else:
        weights_T = raw_T.clamp(low if mode == "clip" else 0.0, high)
    if veto is not None:
        vetoed_T = (ratio(old_T, rollout_T) < veto) & token_rows.mask_T
        weights_T = torch.where(row_means(vetoed_T.to(raw_T.dtype), token_rows) > 0, 0.0, weights_T)
    return weights_T, (weights_T != raw_T).to(old_T.dtype)


def rejection_mask(
    old_T: Tensor, rollout_T: Tensor, token_rows: TokenRows, *, level: str, low: float, high: float
) -> Tensor:
    """Return 1.0 where the weight of `level` lies within [low, high], else 0.0. [T], no gradient.

    Rejection of masked importance sampling: Liu, Li et al. 2025, "When Speed Kills Stability". Level "token" rejects
    single tokens. "sequence" and "geometric" reject whole rows.

    Raises ValueError unless 0 <= low < high, and for an unknown level.
    """
    check_tokens("rejection_mask", old_T=old_T, rollout_T=rollout_T, mask_T=token_rows.mask_T)
    _check_bounds(low, high)
    raw_T = level_ratio(old_T.detach(), rollout_T.detach(), token_rows, level)
    return ((raw_T >= low) & (raw_T <= high)).to(old_T.dtype)


def self_normalization(weights_T: Tensor, token_rows: TokenRows, *, level: str) -> float:
    """Return the mean weight of a whole step, over tokens at level "token" and over rows at other levels.

    The weights are divided by it: the self-normalized estimate of importance sampling (Owen 2013,
    artowen.su.domains/mc, section 9.2), over tokens and rows that `mask_T` keeps. 1 if the mean is 0.
    """
    mask_T, row_T, rows = token_rows
    masked_weights = weights_T[mask_T]
    if level != "token":
        # All tokens of a row have the same weight: keep one per row.
        masked_weights = torch.full((rows,), torch.nan, dtype=masked_weights.dtype).index_put(
            (row_T[mask_T],), masked_weights
        )
        masked_weights = masked_weights[~masked_weights.isnan()]
    mean = float(masked_weights.mean()) if len(masked_weights) else 0.0
    return mean or 1.0


def engine_mismatch_metrics(old_T: Tensor, rollout_T: Tensor) -> dict[str, Tensor]:
    """Return mismatch metrics by name. Each is [T], without gradient, and is reduced with the token weights.

    With w = exp(old - rollout) and log w clamped to ±20, the metrics are |old - rollout|, w before truncation, and two
    estimates of KL(engine || trainer) over tokens that the engine sampled: k1 = -log w and k3 = w - 1 - log w
    (Schulman 2020, joschu.net/blog/kl-approx.html).
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
        raise ValueError(f"low is {low} and high is {high}, but 0 <= low < high is required")
