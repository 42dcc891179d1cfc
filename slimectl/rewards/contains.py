"""Substring match: the answer contains the label."""

from __future__ import annotations

from dataclasses import dataclass

from slimectl.rewards.extraction import SOURCE_WORDS, Source, find, label_text, missing, text_of
from slimectl.rewards.verdict import Verdict, Verifier, graded, nothing
from slimectl.types import Sample


@dataclass(frozen=True)
class Contains(Verifier):
    """1.0 if the label occurs in the answer; case-sensitive unless `ignore_case`. An empty label never occurs."""

    source: Source = "response"
    ignore_case: bool = False

    def explain(self, sample: Sample) -> Verdict:
        label, answer = label_text(sample, "contains"), find(sample, self.source)
        if answer is None:
            return nothing(SOURCE_WORDS[self.source], missing(self.source))
        folded = (label.casefold(), answer.text.casefold()) if self.ignore_case else (label, answer.text)
        right = bool(label) and folded[0] in folded[1]
        return graded(right, SOURCE_WORDS[self.source], answer, label, ("contains", "does not contain"))

    def extract(self, sample: Sample) -> str | None:
        return text_of(find(sample, self.source))
