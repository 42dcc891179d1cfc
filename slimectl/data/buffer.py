"""What sampling keeps between two rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimectl.data.records import sample_from_json, sample_to_json
from slimectl.types import Sample


@dataclass
class SamplingState:
    """Where sampling stands between two rounds: what a checkpoint keeps of it."""

    position: int = 0
    """The next prompt occurrence."""

    rounds: int = 0
    """Rounds made."""

    buffer: list[list[Sample]] = field(default_factory=list)
    """Groups that wait for a later round, oldest first: finished ones with rewards, and some that were broken off."""

    source: Any = None
    """What the user's own data source wants to be told again, as JSON."""

    long_prompts_until: int = 0
    """Prompt occurrences below this one that were too long have been counted."""

    def snapshot(self) -> SamplingState:
        """A state that stays as it is when this one goes on (samples in the buffer are not touched before then)."""
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
    def from_json(cls, facts: Mapping[str, Any]) -> SamplingState:
        buffer = [[sample_from_json(sample) for sample in group] for group in facts["buffer"]]
        until = facts.get("long_prompts_until", 0)
        return cls(facts["position"], facts["rounds"], buffer, facts.get("source"), until)
