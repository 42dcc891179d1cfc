"""How progress is measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slimectl.settings.base import Section


class EvalSettings(Section):
    """Held-out prompts in, pass rates out. What is not given here is as in [rollout] and [score]."""

    data: dict[str, str] = {}
    """Datasets by name, each a prompt source."""

    interval: Annotated[int, Field(ge=1)] | None = None
    """Rollouts between evaluations; only before and after where not given."""

    skip_before_train: bool = False
    """Do not evaluate before the first step."""

    n_samples_per_prompt: Annotated[int, Field(ge=1)] = 1
    """Answers for each prompt; more make pass@k and avg@n."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """Softmax temperature; 0 is greedy."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus probability."""

    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Most likely tokens to sample among; -1 for all."""

    max_response_len: Annotated[int, Field(ge=1)] | None = None
    """Tokens an answer may have."""

    rm_type: str | None = None
    """Verifier."""

    success_threshold: float = 1.0
    """Reward from which an answer counts as right."""

    keep_samples: bool = True
    """Write the samples of each evaluation beside the run's metrics."""
