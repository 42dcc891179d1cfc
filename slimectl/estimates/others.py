"""The models of a run: the policy, and what stands beside it on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slimectl.estimates.parameters import Part, count
from slimectl.weights.architecture import Architecture


@dataclass(frozen=True)
class Standing:
    """A model on the ranks: `parts` are all of it, `trained` those of them that learn."""

    name: Literal["policy", "critic", "reference", "teacher"]
    architecture: Architecture
    parts: Sequence[Part]
    trained: Sequence[Part] = ()

    @property
    def head(self) -> Literal["learns", "stays", "values"]:
        """What stands on the hidden states, and whether its matrix learns."""
        if self.name == "critic":
            return "values"
        kind = "embedding" if self.architecture.tied else "output"
        return "learns" if any(part.kind == kind for part in self.trained) else "stays"

    @property
    def experts_learn(self) -> bool:
        """Whether routed experts do, rather than adapters of them."""
        return count(self.trained, "experts") == count(self.parts, "experts")


def policy_of(architecture: Architecture, parts: Sequence[Part], adapters: Sequence[Part] = ()) -> Standing:
    """The policy: adapters alone learn where there are any."""
    return Standing("policy", architecture, [*parts, *adapters], adapters or parts)


def critic_of(architecture: Architecture, parts: Sequence[Part], adapters: Sequence[Part] = ()) -> Standing:
    """Values on the same backbone: an untied head of the language model is held but does not learn."""
    head = Part("output", None, int(architecture.transformer["hidden_size"]), cut=False)
    backbone = [part for part in parts if part.kind != "output"]
    return Standing("critic", architecture, [*parts, *adapters, head], [*(adapters or backbone), head])
