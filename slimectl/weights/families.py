"""Every family that is known, found by what config.json says."""

from __future__ import annotations

from slimectl.errors import CheckpointError
from slimectl.weights import llama, qwen2, qwen3
from slimectl.weights.architecture import Config
from slimectl.weights.family import Family

FAMILIES = {family.name: family for family in (llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY)}


def family_of(config: Config) -> Family:
    """The family of a configuration. Raises CheckpointError if none is known."""
    model_type = config.get("model_type", "")
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    raise CheckpointError(
        f"config.json: model_type {model_type!r} has no weight mapping; known are {', '.join(sorted(FAMILIES))}"
    )
