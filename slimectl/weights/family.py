"""What a family of models declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slimectl.weights.architecture import Architecture, Config
from slimectl.weights.links import Link


@dataclass(frozen=True)
class Family:
    """Names and shapes of one family.

    `model_types` are the values of `model_type` in config.json that belong to it. `carried` are regular expressions
    for tensors that checkpoints hold and training does not use (multi-token prediction layers): conversions keep them
    untouched.
    """

    name: str
    model_types: tuple[str, ...]
    architecture: Callable[[Config], Architecture]
    links: Callable[[Config], list[Link]]
    carried: tuple[str, ...] = ()
