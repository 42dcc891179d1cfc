"""Estimates the KL divergence of the policy from another, over sampled tokens.

T tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimectl.algorithms.surrogates import LOG_RATIO_LIMIT, check_tokens, ratio

LOW_VAR_LIMIT = 10.0
KINDS = ("k1", "k2", "k3", "low_var_kl")


def kl_estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at each token, [T].

    With r = logp - ref: k1 = r, k2 = r² / 2, k3 = exp(-r) - 1 + r, low_var_kl = k3 clamped to ±10. Schulman 2020,
    joschu.net/blog/kl-approx.html. k3 is the estimate of GRPO, arXiv:2402.03300, eq. 4. The gradient of k1 has mean
    zero over the policy's own tokens, so k1 is a metric and not a penalty. k2 and k3 pull towards the reference.

    Raises ValueError for an unknown kind.
    """
    check_tokens("kl_estimate", logprobs_T=logprobs_T, ref_logprobs_T=ref_logprobs_T)
    r_T = logprobs_T - ref_logprobs_T.detach()
    if kind == "k1":
        return r_T
    if kind == "k2":
        return r_T.square() / 2
    if kind not in KINDS:
        raise ValueError(f"unknown KL estimator {kind!r}. Available: {', '.join(KINDS)}")
    # Clamp the exponent before it overflows: the gradient of a clamp of infinity is NaN, not zero.
    k3_T = torch.exp((-r_T).clamp(max=LOG_RATIO_LIMIT)) - 1 + r_T
    return k3_T if kind == "k3" else k3_T.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)


def unbiased_kl_estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, old_logprobs_T: Tensor, kind: str) -> Tensor:
    """Return `kl_estimate` times exp(logp - old), [T]. This is unbiased for tokens that an older policy sampled.

    DeepSeek-V3.2, arXiv:2512.02556, "Unbiased KL Estimate". Gradients flow through the ratio too, so the gradient of k3
    is the gradient of the divergence. For low_var_kl the product is clamped to ±10.
    """
    estimate_T = kl_estimate(logprobs_T, ref_logprobs_T, "k3" if kind == "low_var_kl" else kind)
    weighted_T = ratio(logprobs_T, old_logprobs_T.detach()) * estimate_T
    return weighted_T.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT) if kind == "low_var_kl" else weighted_T


def approx_kl_metrics(logprobs_T: Tensor, old_logprobs_T: Tensor) -> dict[str, Tensor]:
    """Return metrics of the distance to the sampling policy, by name. Each is [T], without gradient.

    Two estimates of KL(old || policy) over tokens sampled by `old`: ppo_kl = old - logp and approxkl = (logp - old)² /
    2 (Schulman 2020, joschu.net/blog/kl-approx.html). The third metric, ois, is the ratio exp(logp - old).
    """
    logprobs_T, old_logprobs_T = logprobs_T.detach(), old_logprobs_T.detach()
    return {
        "ppo_kl": old_logprobs_T - logprobs_T,
        "approxkl": (logprobs_T - old_logprobs_T).square() / 2,
        "ois": ratio(logprobs_T, old_logprobs_T),
    }
