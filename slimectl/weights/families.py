"""Registry of model families, by model_type of config.json."""

from __future__ import annotations

from slimectl.errors import CheckpointError
from slimectl.weights import (
    deepseek_v3,
    glm4,
    glm4_moe,
    glm_moe_dsa,
    llama,
    mimo,
    minimax_m2,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from slimectl.weights.architecture import Config
from slimectl.weights.family import Family

FAMILIES = {
    family.name: family
    for family in (
        llama.FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        qwen2_moe.FAMILY,
        qwen3_moe.FAMILY,
        deepseek_v3.FAMILY,
        deepseek_v3.GLM,
        glm4.FAMILY,
        glm4_moe.FAMILY,
        mimo.FAMILY,
        minimax_m2.FAMILY,
        qwen3_next.FAMILY,
        qwen3_5.FAMILY,
        qwen3_5.MOE,
        glm_moe_dsa.FAMILY,
    )
}


def family_of(config: Config) -> Family:
    """Look up the family of a configuration. Raises CheckpointError for an unknown model_type."""
    model_type = config.get("model_type", "")
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family.of(config)
    raise CheckpointError(
        f"config.json: model_type {model_type!r} has no weight mapping; known are {', '.join(_model_types())}"
    )


def _model_types() -> list[str]:
    return sorted(name for family in FAMILIES.values() for name in family.model_types)
