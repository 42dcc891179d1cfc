"""Explanations of rewards, for people."""

from __future__ import annotations

from collections.abc import Iterator

from slimectl.types import Sample

MAX_GROUPS = 10


def reason(sample: Sample) -> str:
    """What was extracted from where, and why that got its reward; on one line."""
    found = sample.metadata.get("explanation")
    if found is None:
        return str(sample.metadata.get("reward_error", f"not graded: {sample.status}"))
    if found["extracted"] is None:
        return f"{found['from']}: {found['why']}"
    text = " ".join(found["extracted"].split())
    text = text if len(text) <= 60 else f"{text[:30]}…{text[-30:]}"
    return f"{found['from']}: '{text}' {found['why']}"


class Reasons:
    """Counts how samples came to their rewards, with one example each."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str, bool], tuple[int, Sample]] = {}

    def add(self, sample: Sample, reward: float) -> None:
        found = sample.metadata.get("explanation") or {}
        key = (f"{reward:.3g}", found.get("from", ""), found.get("extracted") is None)
        count, example = self._groups.get(key, (0, sample))
        self._groups[key] = (count + 1, example)

    def lines(self) -> Iterator[str]:
        """The largest groups first."""
        groups = sorted(self._groups.items(), key=lambda group: -group[1][0])
        for (reward, _, _), (count, example) in groups[:MAX_GROUPS]:
            yield f"reward {reward}: {count} samples, e.g. sample {example.index}: {reason(example)}"
        if rest := sum(count for _, (count, _) in groups[MAX_GROUPS:]):
            yield f"{rest} samples in {len(groups) - MAX_GROUPS} more groups"
