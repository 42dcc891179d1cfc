"""Engine and trainer give one token two probabilities; here the difference is measured and made up for.

T tokens. `old` is what the trainer computes for the policy that sampled, `rollout` what the engine reported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimectl.algorithms.surrogates import ratio


def truncated_importance(old_T: Tensor, rollout_T: Tensor, *, low: float = 0.0, high: float = 2.0) -> Tensor:
    """Weights clamp(exp(old - rollout), low, high) to multiply a token's loss by; [T], constant.

    Truncated importance sampling: Ionides 2008, doi:10.1198/106186008X320456; for engine mismatch Yao et al. 2025,
    fengyao.notion.site/off-policy-rl. Log-weights are held within ±20.

    Raises ValueError unless 0 <= low < high.
    """
    _check_bounds(low, high)
    return ratio(old_T.detach(), rollout_T.detach()).clamp(low, high)


def truncated_fraction(old_T: Tensor, rollout_T: Tensor, *, low: float = 0.0, high: float = 2.0) -> Tensor:
    """1.0 for tokens whose weight `truncated_importance` changes, else 0.0; [T], constant."""
    _check_bounds(low, high)
    weights_T = ratio(old_T.detach(), rollout_T.detach())
    return ((weights_T < low) | (weights_T > high)).to(old_T.dtype)


def mismatch(old_T: Tensor, rollout_T: Tensor) -> dict[str, Tensor]:
    """What is always reported of the mismatch, by metric name; each [T], constant, to be reduced by the token weights.

    With w = exp(old - rollout), its logarithm held within ±20: |old - rollout|, w before truncation, and two estimates
    of KL(engine || trainer), whose tokens the engine sampled: k1 = -log w and k3 = w - 1 - log w.
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
