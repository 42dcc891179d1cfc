"""The last number is the label's number."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from slimectl.errors import RecordError
from slimectl.rewards.extraction import Source, label_text, read
from slimectl.rewards.numerals import exact_number, last_number
from slimectl.types import Sample


@dataclass(frozen=True)
class Numeric:
    """1.0 if the last number of the answer equals the label's, as numbers: 5.0 is 5, 042 is 42, 1/2 is 0.5.

    `tolerance` is the largest difference still accepted. Raises RecordError for a label without a number.
    """

    source: Source = "response"
    tolerance: float = 0.0

    def __call__(self, sample: Sample) -> float:
        label = label_text(sample, "numeric")
        wanted = exact_number(last_number(label) or "")
        if wanted is None:
            raise RecordError(f"sample {sample.index}: label: {label[:60]!r} holds no number to compare with")
        answer = exact_number(self.extract(sample) or "")
        return float(answer is not None and abs(answer - wanted) <= Fraction(self.tolerance))

    def extract(self, sample: Sample) -> str | None:
        text = read(sample, self.source)
        return None if text is None else last_number(text)
