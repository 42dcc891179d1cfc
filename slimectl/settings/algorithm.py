"""Algorithms that learn from demonstrations or preferences."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slimectl.settings.base import Section
from slimectl.settings.policy_gradient import (
    Baseline,
    Cispo,
    Dapo,
    DrGrpo,
    Gmpo,
    GroupNormalized,
    Grpo,
    Gspo,
    MaxRl,
    Opd,
    Opo,
    PolicyGradient,
    Ppo,
    ReinforceFamily,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Rloo,
    Sapo,
    Surrogate,
    critic_is_shared,
)


class Sft(Section):
    """Supervised fine-tuning: mean negative log-probability over the loss mask."""

    name: Literal["sft"] = "sft"
    """Which algorithm."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step rather than over samples of each one's mean."""


class Pairwise(Section):
    """Settings of algorithms that learn from preference pairs."""

    pairs: Literal["best_worst", "all"] = "best_worst"
    """Pairs of a group of scored answers: its best with its worst, or all whose rewards differ."""

    calculate_per_token_loss: ClassVar[bool] = False


class Dpo(Pairwise):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290)."""

    name: Literal["dpo"] = "dpo"
    """Which algorithm."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the reference holds the policy."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that are taken to be the wrong way round (cDPO)."""

    ref_load: str | None = None
    """The reference; the model that training starts from where not given."""


class RewardModel(Pairwise):
    """Bradley-Terry reward model (Ouyang et al. 2022, arXiv:2203.02155, eq. 1)."""

    name: Literal["reward_model"] = "reward_model"
    """Which algorithm."""


__all__ = [
    "ALGORITHMS",
    "AlgorithmSettings",
    "Baseline",
    "Dpo",
    "GroupNormalized",
    "Grpo",
    "Opd",
    "Pairwise",
    "PolicyGradient",
    "Ppo",
    "ReinforceFamily",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "RewardModel",
    "Sft",
    "Surrogate",
    "critic_is_shared",
]

AlgorithmSettings = Annotated[
    Grpo
    | DrGrpo
    | Dapo
    | Gspo
    | Cispo
    | Sapo
    | Gmpo
    | Rloo
    | Opo
    | MaxRl
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | Ppo
    | Opd
    | Sft
    | Dpo
    | RewardModel,
    Field(discriminator="name"),
]
ALGORITHMS: dict[str, type[Section]] = {
    cls.model_fields["name"].default: cls
    for cls in (
        Grpo,
        DrGrpo,
        Dapo,
        Gspo,
        Cispo,
        Sapo,
        Gmpo,
        Rloo,
        Opo,
        MaxRl,
        ReinforcePlusPlus,
        ReinforcePlusPlusBaseline,
        Ppo,
        Opd,
        Sft,
        Dpo,
        RewardModel,
    )
}
