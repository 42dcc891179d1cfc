"""Algorithms that learn from demonstrations or preferences, and the union of all algorithms."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from slimectl.settings.needs import AlgorithmSection, Need, Reduction
from slimectl.settings.rollout_algorithms import RolloutAlgorithm


class Sft(AlgorithmSection):
    """Supervised fine-tuning: mean negative log-probability over the loss mask."""

    trains_on = "demonstrations"

    name: Literal["sft"] = "sft"
    """Which algorithm."""

    calculate_per_token_loss: bool = True
    """Average over all tokens of the step, instead of over the mean of each sample."""

    @property
    def reduction(self) -> tuple[Reduction, int | None]:
        return "per_token" if self.calculate_per_token_loss else "rollout_mean", None


class Pairwise(AlgorithmSection):
    """Settings of algorithms that learn from preference pairs."""

    trains_on = "preferences"

    pairs: Literal["best_worst", "all"] = "best_worst"
    """Pairs from a group of scored responses: the best with the worst, or all pairs whose rewards differ."""

    calculate_per_token_loss: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.REWARDS, Need.PAIRS})

    @property
    def reduction(self) -> tuple[Reduction, int | None]:
        # The loss of a pair is a function of sums over its tokens, so each token has the weight 1 / pairs.
        return "fixed_length", 1


class Dpo(Pairwise):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290)."""

    name: Literal["dpo"] = "dpo"
    """Which algorithm."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the pull towards the reference."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that are assumed to be mislabelled (cDPO)."""

    ref_load: str | None = None
    """Reference model. Default: the model that training starts from."""

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {Need.REFERENCE}

    @property
    def reference_load(self) -> str | None:
        return self.ref_load


class RewardModel(Pairwise):
    """Bradley-Terry reward model (Ouyang et al. 2022, arXiv:2203.02155, eq. 1)."""

    trained_output = "values"

    name: Literal["reward_model"] = "reward_model"
    """Which algorithm."""

    beta: ClassVar[float] = 1.0
    """The reward of a response is its value."""

    label_smoothing: ClassVar[float] = 0.0


AlgorithmSettings = Annotated[RolloutAlgorithm | Sft | Dpo | RewardModel, Field(discriminator="name")]
ALGORITHMS: dict[str, type[AlgorithmSection]] = {
    cls.model_fields["name"].default: cls for cls in get_args(get_args(AlgorithmSettings)[0])
}
"""The settings class of every algorithm. See algorithms/registry.py for its advantages and loss."""
