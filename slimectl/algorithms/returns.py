"""Token-level rewards, discounted returns and whitening over a batch.

T tokens
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

VARIANCE_EPSILON = 1e-8


def discounted(rewards_T: Tensor, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma G_{t+1}, with 0 after the last token; [T] to [T]. Sutton & Barto 2018, eq. 3.9."""
    returns_T = torch.empty_like(rewards_T)
    following = rewards_T.new_zeros(())
    for t in range(len(rewards_T) - 1, -1, -1):
        following = rewards_T[t] + gamma * following
        returns_T[t] = following
    return returns_T


def sequence_rewards(reward: float, kl_T: Tensor | None, mask_T: Tensor, *, kl_coef: float) -> Tensor:
    """Return the reward of every token of one answer, [T]: -kl_coef kl, plus `reward` at the last unmasked token.

    Ouyang et al. 2022, arXiv:2203.02155, eq. 2, token by token. A wholly masked answer gives zeros.
    """
    rewards_T = torch.zeros_like(mask_T) if kl_T is None else -kl_coef * kl_T * mask_T
    positions = mask_T.nonzero()
    if not len(positions):
        return torch.zeros_like(mask_T)
    rewards_T[positions[-1]] += reward
    return rewards_T


def reinforce_returns(reward: float, kl_T: Tensor | None, mask_T: Tensor, *, kl_coef: float, gamma: float) -> Tensor:
    """Return the discounted returns of one answer, [T]; zero where masked.

    REINFORCE++, Hu et al. 2025, arXiv:2501.03262: the returns of `sequence_rewards`.
    """
    return discounted(sequence_rewards(reward, kl_T, mask_T, kl_coef=kl_coef), gamma) * mask_T


def whitened(values: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """Normalize each [T] over all unmasked tokens: (x - mean) rsqrt(var + 1e-8), zero where masked.

    Advantage normalisation (Andrychowicz et al. 2020, arXiv:2006.05990), over a global batch as in REINFORCE++ (Hu et
    al. 2025, arXiv:2501.03262). The variance is Bessel-corrected. `values` must be a whole batch: whitening parts of it
    gives other results. Fewer than two tokens have no scale and give zeros, as equal values do.
    """
    masked_values = torch.cat([value_T[mask_T != 0] for value_T, mask_T in zip(values, masks, strict=True)])
    if len(masked_values) < 2 or bool((masked_values == masked_values[0]).all()):
        return [torch.zeros_like(value_T) for value_T in values]
    mean, scale = masked_values.mean(), torch.rsqrt(masked_values.var() + VARIANCE_EPSILON)
    return [(value_T - mean) * scale * (mask_T != 0) for value_T, mask_T in zip(values, masks, strict=True)]
