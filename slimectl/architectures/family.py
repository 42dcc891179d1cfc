"""Declaration of a model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import TypeVar

from slimectl.architectures.config import Architecture, Config
from slimectl.architectures.mapping import ParamMapping
from slimectl.errors import CheckpointError

Result = TypeVar("Result")


def explained(function: Callable[[Config], Result], family: str) -> Callable[[Config], Result]:
    """Wrap a function so that its errors on a configuration become CheckpointErrors: config.json is untrusted input."""
    if hasattr(function, "__wrapped__"):
        return function

    @wraps(function)
    def call(config: Config) -> Result:
        try:
            return function(config)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(
                f"config.json: no {family} model is so ({reason:.200}); copy it from the model's original checkpoint"
            ) from error

    return call


@dataclass(frozen=True)
class Family:
    """Tensor names and shapes of one model family.

    `model_types` are the values of `model_type` in config.json that belong to it. `carried` are regular expressions
    for tensors that checkpoints hold and training does not use (multi-token prediction layers): conversions copy them
    unchanged. `spare_layers` does the same for the layers after the last one (DeepSeek's for multi-token prediction),
    num_nextn_predict_layers of them.
    """

    name: str
    model_types: tuple[str, ...]
    architecture: Callable[[Config], Architecture]
    links: Callable[[Config], list[ParamMapping]]
    carried: tuple[str, ...] = ()
    spare_layers: bool = False

    def __post_init__(self) -> None:
        for field, function in (("architecture", self.architecture), ("links", self.links)):
            object.__setattr__(self, field, explained(function, self.name))

    def of(self, config: Config) -> Family:
        """Return the family for this configuration: with patterns of its spare layers in `carried`."""
        count = config.get("num_nextn_predict_layers") or 0
        if not self.spare_layers or not count:
            return self
        first = config["num_hidden_layers"]
        numbers = "|".join(str(number) for number in range(first, first + count))
        return replace(self, carried=(*self.carried, rf"^model\.layers\.({numbers})\."))
