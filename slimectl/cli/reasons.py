"""Formats explanations of rewards for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from slimectl.types import Sample

MAX_GROUPS = 10


def reason(sample: Sample) -> str:
    """One-line explanation of a reward: source, extracted answer and reason."""
    explanation = sample.metadata.get("explanation")
    if explanation is None:
        return str(sample.metadata.get("reward_error", f"not graded: {sample.status}"))
    if explanation["extracted"] is None:
        return f"{explanation['from']}: {explanation['why']}"
    text = " ".join(explanation["extracted"].split())
    text = text if len(text) <= 60 else f"{text[:30]}…{text[-30:]}"
    return f"{explanation['from']}: '{text}' {explanation['why']}"


class Reasons:
    """Counts samples by reward and source of the answer, with one example each."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str, bool], tuple[int, Sample]] = {}

    def add(self, sample: Sample, reward: float) -> None:
        explanation = sample.metadata.get("explanation") or {}
        key = (f"{reward:.3g}", explanation.get("from", ""), explanation.get("extracted") is None)
        count, example = self._groups.get(key, (0, sample))
        self._groups[key] = (count + 1, example)

    def lines(self) -> Iterator[str]:
        """Yield one line per group, largest first."""
        groups = sorted(self._groups.items(), key=lambda group: -group[1][0])
        for (reward, _, _), (count, example) in groups[:MAX_GROUPS]:
            yield f"reward {reward}: {count} samples, e.g. sample {example.index}: {reason(example)}"
        if remaining := sum(count for _, (count, _) in groups[MAX_GROUPS:]):
            yield f"{remaining} samples in {len(groups) - MAX_GROUPS} more groups"
