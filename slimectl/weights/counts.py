"""What a model's tensors come to: shapes by name, parameters in all and for one token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slimectl.weights.architecture import Config
from slimectl.weights.families import family_of
from slimectl.weights.joins import Shape


@dataclass(frozen=True)
class Parameters:
    """`activated`: those that one token passes through; of the routed experts only as many as it is sent to."""

    total: int
    activated: int


def shapes(config: Config) -> dict[str, Shape]:
    """Every tensor of a checkpoint that the model uses, by its name on disk. Raises CheckpointError."""
    links = family_of(config).links(config)
    return {name: shape for link in links for name, shape in zip(link.hf, link.shapes, strict=True)}


def parameters(config: Config) -> Parameters:
    """Counted from shapes alone; a tied head is the embedding, and a router's bias is not learned by gradients."""
    family = family_of(config)
    architecture = family.architecture(config)
    learned = [link for link in family.links(config) if not link.buffer]
    total = sum(math.prod(link.shape) for link in learned)
    routed = sum(math.prod(link.shape) for link in learned if link.expert is not None)
    if not routed:
        return Parameters(total, total)
    chosen = int(architecture.transformer["moe_router_topk"])
    return Parameters(total, total - routed + routed * chosen // architecture.experts)
