"""Which of two answers is better: pairs, their losses, and the slopes by which a policy learns them.

P pairs · T tokens. A loss of a pair depends on its two answers' sums alone, so its gradient is the loss's slope times
the gradient of a sum: with the slopes known beforehand (one pass without gradients at the same weights) the answers of
a pair may lie in different packs, micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, Protocol

from torch import Tensor
from torch.nn.functional import logsigmoid

from slimectl.errors import SettingsError


class SlopePack(Protocol):
    """What `SlopeLoss` reads of ports.TokenPack."""

    @property
    def logprobs_T(self) -> Tensor: ...
    @property
    def weights_T(self) -> Tensor: ...
    @property
    def advantages_T(self) -> Tensor | None: ...


def preference_pairs(rewards: Sequence[float], kind: Literal["extremes", "all"] = "extremes") -> list[tuple[int, int]]:
    """(position of the better, of the worse) among the answers to one prompt; none where all rewards are equal.

    >>> preference_pairs([0.0, 1.0, 0.5]), preference_pairs([0.0, 1.0, 0.5], "all")
    ([(1, 0)], [(1, 0), (2, 0), (1, 2)])
    """
    if not rewards or min(rewards) == max(rewards):
        return []
    if kind == "extremes":
        return [(rewards.index(max(rewards)), rewards.index(min(rewards)))]
    unequal = [(i, j) for i, j in combinations(range(len(rewards)), 2) if rewards[i] != rewards[j]]
    return [(i, j) if rewards[i] > rewards[j] else (j, i) for i, j in unequal]


def preference_loss(margins_P: Tensor, *, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """-(1 - e) log sigmoid(m) - e log sigmoid(-m), and its slope in m; each [P].

    Bradley-Terry, as a reward model learns it (Ouyang et al. 2022, arXiv:2203.02155, eq. 1), with e of the pairs taken
    to be the wrong way round (cDPO, Mitchell 2023, ericmitchell.ai/cdpo.pdf).
    """
    losses_P = -(1 - label_smoothing) * logsigmoid(margins_P) - label_smoothing * logsigmoid(-margins_P)
    return losses_P, margins_P.sigmoid() - (1 - label_smoothing)


def dpo_rewards(logprob_sums_P: Tensor, ref_sums_P: Tensor, *, beta: float) -> Tensor:
    """beta (log pi(y|x) - log pi_ref(y|x)): the reward that a policy implies for each answer; [P].

    Rafailov et al. 2023, arXiv:2305.18290, section 4; its loss (eq. 7) is `preference_loss` of chosen less rejected.
    """
    return beta * (logprob_sums_P - ref_sums_P)


@dataclass(frozen=True)
class SlopeLoss:
    """-sum(weight advantage value): its gradient is that of any loss whose negative slopes the advantages are.

    No metrics: the value that a person wants to see is the loss whose slopes these are.
    """

    @property
    def needs_entropy(self) -> bool:
        return False

    def __call__(self, pack: SlopePack) -> tuple[Tensor, dict[str, Tensor]]:
        if pack.advantages_T is None:
            raise SettingsError("a preference loss needs its slopes; train with algorithm.name dpo or reward_model")
        return -(pack.weights_T * pack.advantages_T * pack.logprobs_T).sum(), {}
