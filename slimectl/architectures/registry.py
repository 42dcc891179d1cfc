"""Registry of model families, by model_type of config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slimectl.architectures import deepseek, glm, llama, minimax, qwen, qwen_next, qwen_vl
from slimectl.architectures.config import Config, Family
from slimectl.architectures.mapping import Shape
from slimectl.errors import CheckpointError

FAMILIES = {
    family.name: family
    for family in (
        llama.FAMILY,
        qwen.QWEN2,
        qwen.QWEN3,
        qwen.QWEN2_MOE,
        qwen.QWEN3_MOE,
        deepseek.FAMILY,
        deepseek.GLM,
        glm.GLM4,
        glm.GLM4_MOE,
        qwen.MIMO,
        minimax.FAMILY,
        qwen_next.QWEN3_NEXT,
        qwen_next.QWEN3_5,
        qwen_next.QWEN3_5_MOE,
        glm.GLM_MOE_DSA,
        qwen_vl.QWEN2_5_VL,
        qwen_vl.QWEN3_VL,
    )
}


def family_of(config: Config) -> Family:
    """Look up the family of a configuration. Raises CheckpointError for an unknown model_type."""
    model_type = config.get("model_type", "")
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family.of(config)
    raise CheckpointError(
        f"config.json: model_type {model_type!r} has no weight mapping. Supported: {', '.join(_model_types())}. To add "
        f"one, see CONTRIBUTING, recipe 3. megatron.custom_model_provider_path replaces the model, not its mapping."
    )


def _model_types() -> list[str]:
    return sorted(name for family in FAMILIES.values() for name in family.model_types)


@dataclass(frozen=True)
class Parameters:
    """Parameter counts. `activated` counts the parameters that one token uses, with only the top k routed experts."""

    total: int
    activated: int


def shapes(config: Config) -> dict[str, Shape]:
    """Return the shape of every tensor that the model uses, by its name on disk. Raises CheckpointError."""
    links = family_of(config).links(config)
    return {name: shape for link in links for name, shape in zip(link.hf, link.shapes, strict=True)}


def parameters(config: Config) -> Parameters:
    """Count parameters from shapes. A tied head counts as the embedding. A router's bias is not a parameter."""
    family = family_of(config)
    architecture = family.architecture(config)
    sizes = [(math.prod(link.shape), link.expert is not None) for link in family.links(config) if not link.buffer]
    total = sum(size for size, _ in sizes)
    routed = sum(size for size, expert in sizes if expert)
    if not routed:
        return Parameters(total, total)
    topk = int(architecture.transformer["moe_router_topk"])
    return Parameters(total, total - routed + routed * topk // architecture.experts)
