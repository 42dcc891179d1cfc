"""Weighted sum of several verifiers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slimectl.errors import HookError
from slimectl.rewards.verdict import Verdict, Verifier, is_number
from slimectl.types import Sample

if TYPE_CHECKING:
    from slimectl.rewards.asking import Asker


@dataclass(frozen=True)
class Part:
    """One verifier of a sum; `key` selects the number from a dict reward."""

    name: str
    weight: float
    verifier: Verifier
    key: str = "score"

    def number(self, reward: float | dict[str, Any]) -> float:
        """The part's reward as a number. Raises HookError for a dict without `key`, as a server may send."""
        number = reward.get(self.key) if isinstance(reward, dict) else reward
        if not is_number(number):
            raise HookError(f"score.rm: {self.name}: no number under {self.key!r} in {str(reward)[:60]}")
        return float(number)


@dataclass(frozen=True)
class WeightedSum(Verifier):
    """{score: sum of weight times part, NAME: each part, unweighted}; extracts the first part's answer."""

    parts: tuple[Part, ...]

    @property
    def bounds(self) -> tuple[float, float]:
        ends = [sorted(part.weight * end for end in part.verifier.bounds) for part in self.parts]
        return sum(low for low, _ in ends), sum(high for _, high in ends)

    @property
    def waits(self) -> bool:
        return any(part.verifier.waits for part in self.parts)

    @property
    def patience_s(self) -> float:
        return sum(part.verifier.patience_s for part in self.parts)

    def explain(self, sample: Sample) -> Verdict:
        return self._combine([part.verifier.explain(sample) for part in self.parts])

    async def asked(self, samples: Sequence[Sample], asker: Asker) -> list[Verdict]:
        by_part = await asyncio.gather(*(part.verifier.asked(samples, asker) for part in self.parts))
        return [self._combine(verdicts) for verdicts in zip(*by_part, strict=True)]

    def _combine(self, verdicts: Sequence[Verdict]) -> Verdict:
        numbers = [part.number(verdict.reward) for part, verdict in zip(self.parts, verdicts, strict=True)]
        total = sum(part.weight * number for part, number in zip(self.parts, numbers, strict=True))
        names = [part.name for part in self.parts]
        reasons = [
            f"{part.weight:g} x {part.name} {number:g} ({verdict.why})"
            for part, number, verdict in zip(self.parts, numbers, verdicts, strict=True)
        ]
        reward = {"score": total, **dict(zip(names, numbers, strict=True))}
        return Verdict(reward, verdicts[0].source, "; ".join(reasons), verdicts[0].extracted, verdicts[0].span)

    def extract(self, sample: Sample) -> str | None:
        return self.parts[0].verifier.extract(sample)
