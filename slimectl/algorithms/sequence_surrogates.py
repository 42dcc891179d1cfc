"""Sequence-level surrogates and masks.

T tokens of one pack; `row_T` is the index of a token's row among the `rows`, and `mask_T` (bool) marks tokens in the
loss.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_means(values_T: Tensor, mask_T: Tensor, row_T: Tensor, rows: int) -> Tensor:
    """Return the mean of each row over its unmasked tokens, at every token of the row; [T]; 0 for a masked row."""
    sums = values_T.new_zeros(rows).index_add(0, row_T, torch.where(mask_T, values_T, 0.0))
    counts = values_T.new_zeros(rows).index_add(0, row_T, mask_T.to(values_T.dtype))
    return (sums / counts.clamp(min=1))[row_T]


def sequence_logprobs(logprobs_T: Tensor, old_T: Tensor, mask_T: Tensor, row_T: Tensor, rows: int) -> Tensor:
    """Return log-probabilities whose ratio to `old_T` is the sequence-level ratio at each token, for `ppo_clip`; [T].

    GSPO, Zheng et al. 2025, arXiv:2507.18071, eq. 7: s = exp(mean(logp - old)), the length-normalised ratio.
    """
    old_T = old_T.detach()
    return old_T + row_means(logprobs_T - old_T, mask_T, row_T, rows)


def geometric_mean(
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    row_T: Tensor,
    rows: int,
    *,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Return -A times the geometric mean of the clipped ratios, to minimise, and 1.0 where clipped; each [T].

    GMPO, Zhao et al. 2025, arXiv:2507.20673: bounds are on the log-ratio, [-low, high], and apply on the side
    to which the advantage pushes. Advantages must be equal within a row.
    """
    log_ratio_T = logprobs_T - old_T.detach()
    bounded_T = torch.where(advantages_T < 0, log_ratio_T.clamp(min=-low), log_ratio_T.clamp(max=high))
    clipped_T = ((bounded_T != log_ratio_T) & (advantages_T != 0)).to(logprobs_T.dtype)
    return -advantages_T * torch.exp(row_means(bounded_T, mask_T, row_T, rows)), clipped_T


def off_policy_kept(
    logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, mask_T: Tensor, row_T: Tensor, rows: int, *, delta: float
) -> Tensor:
    """Return 0.0 for tokens of off-policy bad sequences (A < 0, mean(old - logp) > delta), else 1.0; [T].

    Off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556. Constant.
    """
    distance_T = row_means((old_T - logprobs_T).detach(), mask_T, row_T, rows)
    return 1.0 - ((advantages_T < 0) & (distance_T > delta)).to(logprobs_T.dtype)
