"""Models of a run: the policy, and further models on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slimectl.estimates.parameters import Part, count
from slimectl.weights.architecture import Architecture


@dataclass(frozen=True)
class Standing:
    """A model on the ranks: `parts` are all of its parameters, `trained` the trainable ones."""

    name: Literal["policy", "critic", "reference", "teacher"]
    architecture: Architecture
    parts: Sequence[Part]
    trained: Sequence[Part] = ()

    @property
    def head(self) -> Literal["learns", "stays", "values"]:
        """Kind of the head, and whether its matrix is trained."""
        if self.name == "critic":
            return "values"
        kind = "embedding" if self.architecture.tied else "output"
        return "learns" if any(part.kind == kind for part in self.trained) else "stays"

    @property
    def experts_learn(self) -> bool:
        """Whether routed experts are trained, rather than their adapters."""
        return count(self.trained, "experts") == count(self.parts, "experts")


def policy_of(architecture: Architecture, parts: Sequence[Part], adapters: Sequence[Part] = ()) -> Standing:
    """Build the policy; if there are adapters, only they are trained."""
    return Standing("policy", architecture, [*parts, *adapters], adapters or parts)


def critic_of(architecture: Architecture, parts: Sequence[Part], adapters: Sequence[Part] = ()) -> Standing:
    """Build a critic on the same backbone; an untied LM head is in memory but not trained."""
    head = Part("output", None, int(architecture.transformer["hidden_size"]), cut=False)
    backbone = [part for part in parts if part.kind != "output"]
    return Standing("critic", architecture, [*parts, *adapters, head], [*(adapters or backbone), head])
