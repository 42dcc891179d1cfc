"""State of the sampling side between two rounds, as checkpoints store it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimectl.data.records import sample_from_json, sample_to_json
from slimectl.types import Sample


@dataclass
class SamplingState:
    """Position, buffer and data source of the sampling side between two rounds; part of every checkpoint."""

    position: int = 0
    """The next prompt occurrence."""

    rounds: int = 0
    """Number of completed rounds."""

    buffer: list[list[Sample]] = field(default_factory=list)
    """Groups buffered for a later round, oldest first: finished groups with rewards, and interrupted ones."""

    source: Any = None
    """State of the user's data source, as JSON; handed back to it on resume."""

    long_prompts_until: int = 0
    """Overlong prompts at occurrences below this one have been counted already."""

    def snapshot(self) -> SamplingState:
        """A copy that does not change as this state advances (the samples in the buffer are shared, not copied)."""
        buffer = [list(group) for group in self.buffer]
        return SamplingState(self.position, self.rounds, buffer, self.source, self.long_prompts_until)

    def to_json(self) -> dict[str, Any]:
        buffer = [[sample_to_json(sample) for sample in group] for group in self.buffer]
        return {
            "position": self.position,
            "rounds": self.rounds,
            "buffer": buffer,
            "source": self.source,
            "long_prompts_until": self.long_prompts_until,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> SamplingState:
        buffer = [[sample_from_json(sample) for sample in group] for group in state["buffer"]]
        until = state.get("long_prompts_until", 0)
        return cls(state["position"], state["rounds"], buffer, state.get("source"), until)
