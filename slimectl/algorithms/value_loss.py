"""Value loss, generalized advantages and explained variance of a critic.

T tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimectl.algorithms.distillation import Divergence
from slimectl.algorithms.surrogates import check_tokens
from slimectl.errors import SettingsError
from slimectl.types import Loss, TokenBatch


def generalized_advantages(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, *, gamma: float, lambd: float
) -> Tensor:
    """Return GAE: A_t = delta_t + gamma lambda A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t. Each [T].

    Schulman et al. 2015, arXiv:1506.02438, eq. 16. Steps are actions, the unmasked tokens: t + 1 is the next unmasked
    token, and tool output in between gets 0. Value and advantage after the last action are 0, because it is terminal.
    The critic is trained on the returns A + V.
    """
    check_tokens("generalized_advantages", rewards_T=rewards_T, values_T=values_T, mask_T=mask_T)
    advantages_T = torch.zeros_like(rewards_T)
    advantage = value_after = rewards_T.new_zeros(())
    for t in reversed(mask_T.nonzero().flatten().tolist()):
        advantage = rewards_T[t] + gamma * value_after - values_T[t] + gamma * lambd * advantage
        advantages_T[t], value_after = advantage, values_T[t]
    return advantages_T


def clipped_value_loss(values_T: Tensor, old_T: Tensor, returns_T: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """Return max((V - R)², (clip(V, V_old ± clip) - R)²), without 1/2, and 1.0 where the second is larger. Each [T].

    PPO's value clipping, as in the authors' code (Schulman et al. 2017, arXiv:1707.06347; github.com/openai/baselines).
    """
    check_tokens("clipped_value_loss", values_T=values_T, old_T=old_T, returns_T=returns_T)
    unclipped_T = (values_T - returns_T).square()
    change_T = values_T - old_T
    # Within the bounds the two differ only by rounding.
    bounded_T = (old_T + change_T.clamp(-clip, clip) - returns_T).square()
    clipped_T = torch.where(change_T.abs() > clip, bounded_T, unclipped_T)
    return torch.maximum(unclipped_T, clipped_T), (clipped_T > unclipped_T).to(values_T.dtype)


def explained_variance(values: Sequence[Tensor], returns: Sequence[Tensor], masks: Sequence[Tensor]) -> float:
    """Return 1 - var(R - V) / var(R) over all unmasked tokens: 1 is perfect, 0 as good as the mean.

    Each argument has a tensor [T] per response. Returns 0 if R is constant. It is the coefficient of determination
    without the penalty for a constant error, as the authors of PPO report it (Schulman et al. 2017;
    github.com/openai/baselines).
    """
    bool_masks = [mask_T != 0 for mask_T in masks]
    returns_K = torch.cat([return_T[mask_T] for return_T, mask_T in zip(returns, bool_masks, strict=True)])
    values_K = torch.cat([value_T[mask_T] for value_T, mask_T in zip(values, bool_masks, strict=True)])
    variance = float(returns_K.var(correction=0)) if len(returns_K) else 0.0
    return 1.0 - float((returns_K - values_K).var(correction=0)) / variance if variance else 0.0


@dataclass(frozen=True)
class ValueLoss:
    """Weighted sum of `clipped_value_loss` (Schulman et al. 2017, arXiv:1707.06347, eq. 9, the second term).

    The metric value_loss is weighted like the loss. The other metrics are means: value_clipfrac, value (before the
    round), vpred (the current values), and error (the squared error of vpred without clipping). `report_scale` is 1
    over the sum of the step's `weights_T`, as in PolicyLoss.

    Raises SettingsError if the pack has no values and returns.
    """

    value_clip: float = 0.2
    report_scale: float = 1.0

    @property
    def needs_entropy(self) -> bool:
        return False

    def __call__(self, pack: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.from_values(pack.logprobs_T, pack)

    def from_values(self, values_T: Tensor, pack: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of the values [T], which carry the gradient."""
        if pack.values_T is None or pack.returns_T is None:
            raise SettingsError("a value loss needs values and returns. Train with algorithm.name ppo.")
        loss_T, clipped_T = clipped_value_loss(values_T, pack.values_T, pack.returns_T, clip=self.value_clip)
        loss = (pack.weights_T * loss_T).sum()
        current_T = values_T.detach()
        metrics = {
            "value_clipfrac": clipped_T,
            "value": pack.values_T,
            "vpred": current_T,
            "error": (current_T - pack.returns_T).square(),
        }
        return loss, {"value_loss": loss.detach()} | {
            name: self.report_scale * (pack.weights_T * x_T).sum() for name, x_T in metrics.items()
        }


@dataclass(frozen=True)
class PolicyAndValueLoss:
    """Policy loss plus `coef` times the value loss of the critic on the policy's backbone. Its metrics are critic-….

    Schulman et al. 2017, arXiv:1707.06347, eq. 9. The entropy bonus is part of the policy loss. Raises SettingsError
    if the pack has no current values.
    """

    policy: Loss
    value: ValueLoss
    coef: float

    @property
    def needs_entropy(self) -> bool:
        return self.policy.needs_entropy

    @property
    def divergence(self) -> Divergence | None:
        return getattr(self.policy, "divergence", None)

    def __call__(self, pack: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if pack.predicted_T is None:
            raise SettingsError('algorithm.critic: this trainer has no value head on its policy. Set it to "separate".')
        loss, metrics = self.policy(pack)
        value, value_metrics = self.value.from_values(pack.predicted_T, pack)
        value_metrics = {f"critic-{name}": part for name, part in {"loss": value.detach(), **value_metrics}.items()}
        return loss + self.coef * value, metrics | value_metrics
