"""Numeric match of the last number in the answer."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from slimectl.errors import RecordError
from slimectl.rewards.extraction import SOURCE_WORDS, Source, find, label_text, missing, text_of
from slimectl.rewards.numerals import exact_number, find_last_number, last_number
from slimectl.rewards.verdict import Found, Verdict, Verifier, graded, nothing
from slimectl.types import Sample


@dataclass(frozen=True)
class Numeric(Verifier):
    """1.0 if the last number of the answer equals the label's, as numbers: 5.0 is 5, 042 is 42, 1/2 is 0.5.

    `tolerance` is the largest accepted absolute difference. Raises RecordError for a label without a number.
    """

    source: Source = "response"
    tolerance: float = 0.0

    def explain(self, sample: Sample) -> Verdict:
        label = label_text(sample, "numeric")
        expected = exact_number(last_number(label) or "")
        if expected is None:
            raise RecordError(f"sample {sample.index}: label: {label[:60]!r} holds no number to compare with")
        source = f"last number of the {SOURCE_WORDS[self.source]}"
        part = find(sample, self.source)
        answer = self._find(sample)
        if answer is None:
            return nothing(source, missing(self.source) if part is None else "no number there")
        value = exact_number(answer.text)
        right = value is not None and abs(value - expected) <= Fraction(self.tolerance)
        return graded(right, source, answer, label)

    def extract(self, sample: Sample) -> str | None:
        return text_of(self._find(sample))

    def _find(self, sample: Sample) -> Found | None:
        part = find(sample, self.source)
        number = find_last_number(part.text) if part else None
        return Found(number.text, part.start + number.start) if part and number else None
