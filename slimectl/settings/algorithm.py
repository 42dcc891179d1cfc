"""Settings of the training algorithm: one class per algorithm, with the defaults of its paper."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slimectl.settings.algorithms.by_token import (
    Opd,
    Ppo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Whitened,
    critic_is_shared,
)
from slimectl.settings.algorithms.compared import Cispo, Dapo, DrGrpo, Gmpo, Grpo, Gspo, MaxRl, Opo, Rloo, Sapo
from slimectl.settings.algorithms.policy_gradient import Baseline, GroupNormalized, PolicyGradient, Surrogate
from slimectl.settings.algorithms.supervised import Dpo, Pairwise, RewardModel, Sft
from slimectl.settings.base import Section

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
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "RewardModel",
    "Sft",
    "Surrogate",
    "Whitened",
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
