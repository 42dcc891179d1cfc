"""Tensor shapes and parameter counts of a model, total and activated per token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slimectl.weights.architecture import Config
from slimectl.weights.families import family_of
from slimectl.weights.joins import Shape


@dataclass(frozen=True)
class Parameters:
    """Parameter counts; `activated` are those that one token uses: of the routed experts only the top k."""

    total: int
    activated: int


def shapes(config: Config) -> dict[str, Shape]:
    """Shape of every tensor of a checkpoint that the model uses, by its name on disk. Raises CheckpointError."""
    links = family_of(config).links(config)
    return {name: shape for link in links for name, shape in zip(link.hf, link.shapes, strict=True)}


def parameters(config: Config) -> Parameters:
    """Count parameters from shapes alone; a tied head counts as the embedding, a router's bias is not a parameter."""
    family = family_of(config)
    architecture = family.architecture(config)
    trained = [link for link in family.links(config) if not link.buffer]
    total = sum(math.prod(link.shape) for link in trained)
    routed = sum(math.prod(link.shape) for link in trained if link.expert is not None)
    if not routed:
        return Parameters(total, total)
    topk = int(architecture.transformer["moe_router_topk"])
    return Parameters(total, total - routed + routed * topk // architecture.experts)
