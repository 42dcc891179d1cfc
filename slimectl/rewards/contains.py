"""The answer has the label in it."""

from __future__ import annotations

from dataclasses import dataclass

from slimectl.rewards.extraction import Source, label_text, read
from slimectl.types import Sample


@dataclass(frozen=True)
class Contains:
    """1.0 if the label occurs in the answer; case counts unless `ignore_case`. An empty label occurs nowhere."""

    source: Source = "response"
    ignore_case: bool = False

    def __call__(self, sample: Sample) -> float:
        label, answer = label_text(sample, "contains"), self.extract(sample)
        if not answer or not label:
            return 0.0
        return float(label.casefold() in answer.casefold() if self.ignore_case else label in answer)

    def extract(self, sample: Sample) -> str | None:
        return read(sample, self.source)
