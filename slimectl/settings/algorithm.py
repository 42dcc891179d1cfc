"""What is learnt from the rewards: one settings class per algorithm, its defaults those we would train with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slimectl.settings.base import Section


class Grpo(Section):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

    name: Literal["grpo"] = "grpo"
    """Which algorithm."""

    eps_clip: Annotated[float, Field(gt=0, le=1)] = 0.2
    """How far the probability ratio may fall below 1 before its gradient stops."""

    eps_clip_high: Annotated[float, Field(gt=0)] | None = None
    """How far it may rise above 1; eps_clip where not given (DAPO: 0.28)."""

    eps_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: bound on the loss of bad tokens whose ratio exploded; off where not given."""

    grpo_std_normalization: bool = True
    """Divide by the group's standard deviation; off is Dr. GRPO (arXiv:2503.20783)."""

    drop_zero_std_groups: bool = True
    """Leave out groups whose rewards are all equal: they carry no signal, only weight in the mean."""

    calculate_per_token_loss: bool = False
    """Mean over all tokens of the step rather than over rollouts of each one's mean."""

    fixed_length: Annotated[int, Field(ge=1)] | None = None
    """Divide each rollout's sum by this constant instead of its own length (Dr. GRPO)."""

    kl_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the reference in the loss."""

    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Estimator of that divergence."""

    use_unbiased_kl: bool = False
    """Weight the estimator by the importance ratio."""

    ref_load: str | None = None
    """Model to measure the divergence from; the one that the run starts from where not given."""

    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus; 0 builds no entropy graph."""

    use_rollout_logprobs: bool = False
    """Take the engine's log-probabilities as those of the old policy instead of recomputing them."""

    use_tis: bool = False
    """Truncated importance sampling: correct for engine and trainer disagreeing."""

    tis_clip: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of that weight."""

    tis_clip_low: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound of that weight."""


class Sft(Section):
    """Supervised fine-tuning: mean negative log-probability over the loss mask."""

    name: Literal["sft"] = "sft"
    """Which algorithm."""

    calculate_per_token_loss: bool = True
    """Mean over all tokens of the step rather than over samples of each one's mean."""


AlgorithmSettings = Annotated[Grpo | Sft, Field(discriminator="name")]
ALGORITHMS: dict[str, type[Section]] = {"grpo": Grpo, "sft": Sft}
