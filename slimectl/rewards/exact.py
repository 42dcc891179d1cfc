"""The answer is the label, to the letter."""

from __future__ import annotations

from dataclasses import dataclass

from slimectl.rewards.extraction import Source, label_text, read
from slimectl.types import Sample


@dataclass(frozen=True)
class Exact:
    """1.0 if the answer equals the label, both stripped; case counts unless `ignore_case`."""

    source: Source = "response"
    ignore_case: bool = False

    def __call__(self, sample: Sample) -> float:
        label, answer = label_text(sample, "exact"), self.extract(sample)
        if answer is None:
            return 0.0
        return float(answer.casefold() == label.casefold() if self.ignore_case else answer == label)

    def extract(self, sample: Sample) -> str | None:
        return read(sample, self.source)
