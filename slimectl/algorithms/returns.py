"""Rewards at the end of an answer, spread over its tokens, and put on one scale over the whole batch.

T tokens
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

VARIANCE_EPSILON = 1e-8


def discounted(rewards_T: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1}, nothing after the last token; [T] to [T]. Sutton & Barto 2018, eq. 3.9."""
    returns_T = torch.empty_like(rewards_T)
    following = rewards_T.new_zeros(())
    for t in range(len(rewards_T) - 1, -1, -1):
        following = rewards_T[t] + gamma * following
        returns_T[t] = following
    return returns_T


def sequence_rewards(reward: float, kl_T: Tensor | None, mask_T: Tensor, *, kl_coef: float) -> Tensor:
    """The reward of every token of one answer, [T]: -kl_coef kl, and `reward` at the last that the mask keeps.

    Ouyang et al. 2022, arXiv:2203.02155, eq. 2, token by token. An answer masked whole gives zeros.
    """
    rewards_T = torch.zeros_like(mask_T) if kl_T is None else -kl_coef * kl_T * mask_T
    kept = mask_T.nonzero()
    if not len(kept):
        return torch.zeros_like(mask_T)
    rewards_T[kept[-1]] += reward
    return rewards_T


def reinforce_returns(reward: float, kl_T: Tensor | None, mask_T: Tensor, *, kl_coef: float, gamma: float) -> Tensor:
    """Discounted returns of one answer, [T]; zero where masked.

    REINFORCE++, Hu et al. 2025, arXiv:2501.03262: the returns of `sequence_rewards`.
    """
    return discounted(sequence_rewards(reward, kl_T, mask_T, kl_coef=kl_coef), gamma) * mask_T


def whitened(values: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """Each [T] on one scale: (x - mean) rsqrt(var + 1e-8) over all tokens that the masks keep, zero elsewhere.

    Advantage normalisation (Andrychowicz et al. 2020, arXiv:2006.05990), over a global batch as in REINFORCE++ (Hu et
    al. 2025, arXiv:2501.03262). The variance is Bessel-corrected. `values` are a whole batch: what is whitened in parts
    depends on the parts. Fewer than two tokens have no scale and give zeros, as equal values do.
    """
    kept = torch.cat([value_T[mask_T != 0] for value_T, mask_T in zip(values, masks, strict=True)])
    if len(kept) < 2 or bool((kept == kept[0]).all()):
        return [torch.zeros_like(value_T) for value_T in values]
    mean, scale = kept.mean(), torch.rsqrt(kept.var() + VARIANCE_EPSILON)
    return [(value_T - mean) * scale * (mask_T != 0) for value_T, mask_T in zip(values, masks, strict=True)]
