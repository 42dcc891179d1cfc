"""Exact match: the answer equals the label."""

from __future__ import annotations

from dataclasses import dataclass

from slimectl.rewards.extraction import SOURCE_WORDS, Source, find, label_text, missing, text_of
from slimectl.rewards.verdict import Verdict, Verifier, graded, nothing
from slimectl.types import Sample


@dataclass(frozen=True)
class Exact(Verifier):
    """1.0 if the answer equals the label, both stripped; case-sensitive unless `ignore_case`."""

    source: Source = "response"
    ignore_case: bool = False

    def explain(self, sample: Sample) -> Verdict:
        label, answer = label_text(sample, "exact"), find(sample, self.source)
        if answer is None:
            return nothing(SOURCE_WORDS[self.source], missing(self.source))
        right = answer.text.casefold() == label.casefold() if self.ignore_case else answer.text == label
        return graded(right, SOURCE_WORDS[self.source], answer, label)

    def extract(self, sample: Sample) -> str | None:
        return text_of(find(sample, self.source))
