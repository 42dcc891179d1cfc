"""Preference pairs, their Bradley-Terry and DPO losses, and the linearized loss by which a policy is trained on them.

P pairs · T tokens. The loss of a pair depends only on the log-probability sums of its two responses. Its gradient is
therefore the loss's slope times the gradient of a sum. The slopes come from an earlier pass at the same weights,
without gradients, so the responses of a pair may be in different packs, micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from torch import Tensor
from torch.nn.functional import logsigmoid

from slimectl.errors import SettingsError
from slimectl.types import TokenBatch


def preference_pairs(
    rewards: Sequence[float], kind: Literal["best_worst", "all"] = "best_worst"
) -> list[tuple[int, int]]:
    """Return pairs (position of the better response, of the worse one) of one prompt. Empty if all rewards are equal.

    >>> preference_pairs([0.0, 1.0, 0.5]), preference_pairs([0.0, 1.0, 0.5], "all")
    ([(1, 0)], [(1, 0), (2, 0), (1, 2)])
    """
    if not rewards or min(rewards) == max(rewards):
        return []
    if kind == "best_worst":
        return [(rewards.index(max(rewards)), rewards.index(min(rewards)))]
    unequal = [(i, j) for i, j in combinations(range(len(rewards)), 2) if rewards[i] != rewards[j]]
    return [(i, j) if rewards[i] > rewards[j] else (j, i) for i, j in unequal]


def preference_loss(margins_P: Tensor, *, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return -(1 - e) log sigmoid(m) - e log sigmoid(-m), and its slope in m. Each [P].

    Bradley-Terry loss of a reward model (Ouyang et al. 2022, arXiv:2203.02155, eq. 1), where a fraction e of the pairs
    is assumed to be mislabelled (cDPO, Mitchell 2023, ericmitchell.ai/cdpo.pdf).
    """
    losses_P = -(1 - label_smoothing) * logsigmoid(margins_P) - label_smoothing * logsigmoid(-margins_P)
    return losses_P, margins_P.sigmoid() - (1 - label_smoothing)


def dpo_rewards(logprob_sums_P: Tensor, ref_sums_P: Tensor, *, beta: float) -> Tensor:
    """Return beta (log pi(y|x) - log pi_ref(y|x)), the implicit reward of each response. [P].

    Rafailov et al. 2023, arXiv:2305.18290, section 4. Its loss (eq. 7) is `preference_loss` of chosen minus rejected.
    """
    return beta * (logprob_sums_P - ref_sums_P)


@dataclass(frozen=True)
class LinearizedLoss:
    """Linearized loss -sum(weight advantage value), with the gradient of any loss whose negative slopes are advantages.

    It has no metrics. Report the loss from which the slopes were computed.
    """

    @property
    def needs_entropy(self) -> bool:
        return False

    def __call__(self, pack: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if pack.advantages_T is None:
            raise SettingsError("a preference loss needs its slopes. Train with algorithm.name dpo or reward_model.")
        return -(pack.weights_T * pack.advantages_T * pack.logprobs_T).sum(), {}
