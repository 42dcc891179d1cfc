"""Compares the answer with the label as text, by shared words, or as a number."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter, deque
from dataclasses import dataclass
from fractions import Fraction

from slimectl.errors import RecordError, SettingsError
from slimectl.rewards.base import Grade, Span, Verifier, binary_grade, no_answer, quote
from slimectl.rewards.extraction import (
    SOURCE_NAMES,
    Source,
    any_label,
    composed,
    find,
    label_text,
    missing,
    text_of,
    trimmed,
)
from slimectl.rewards.math.numbers import find_last_number, last_number, written_number
from slimectl.rewards.thoughts import first_tag
from slimectl.types import Sample


def folded(text: str, ignore_case: bool) -> str:
    """The text for comparison: composed, and without case with `ignore_case`."""
    return composed(text).casefold() if ignore_case else composed(text)


@dataclass(frozen=True)
class Regex(Verifier):
    r"""1.0 if the last match of `pattern` captures the label. Without a pattern, the label is the pattern.

    >>> Regex(pattern=r"Answer:\s*(\w+)").extract(Sample(response="Answer: A. No, wait. Answer: B"))
    'B'

    The captured answer is the group `answer`, else the first group, else the whole match. It is compared without outer
    blanks. Raises SettingsError for an invalid pattern, and for one with a reasoning tag that its `source` excludes.
    Raises RecordError for a label that is an invalid pattern. Some patterns, such as (a+)+$, take
    exponential time on some texts. The time limit holds for them only in worker processes (score.workers).
    """

    pattern: str | None = None
    source: Source = "response"
    ignore_case: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise SettingsError(
                f"score.rm_options.pattern: {self.pattern!r} is not a regular expression: {error}"
            ) from None
        tag = first_tag(self.pattern or "")
        if tag and self.source != "with_thought":
            raise SettingsError(
                f"score.rm_options.pattern: looks for {tag}, but thoughts are not searched. "
                f'Set score.rm_options.source="with_thought".'
            )

    @any_label
    def explain(self, sample: Sample) -> Grade:
        label, answer = label_text(sample, "regex"), self._find(sample)
        pattern = label if self.pattern is None else self.pattern
        source = f"last match in the {SOURCE_NAMES[self.source]}"
        if answer is None:
            absent = find(sample, self.source) is None
            return no_answer(source, missing(sample, self.source) if absent else f"no match of {quote(pattern)}")
        if self.pattern is None:
            return Grade(1.0, source, f"the label {quote(label)} matches", answer.text, answer.span)
        right = folded(answer.text, self.ignore_case) == folded(label, self.ignore_case)
        return binary_grade(right, source, answer, label)

    def extract(self, sample: Sample) -> str | None:
        by_label = self.pattern is None and isinstance(sample.label, list)
        return self.explain(sample).extracted if by_label else text_of(self._find(sample))

    def same_answer(self, sample: Sample, first: str, second: str) -> bool:
        return folded(first, self.ignore_case) == folded(second, self.ignore_case)

    def _find(self, sample: Sample) -> Span | None:
        part = find(sample, self.source)
        pattern = label_text(sample, "regex") if self.pattern is None else self.pattern
        try:
            compiled = re.compile(pattern, re.IGNORECASE if self.ignore_case else 0)
        except re.error as error:
            raise RecordError(f"sample {sample.index}: label: not a regular expression: {error}") from None
        matches = deque(compiled.finditer(part.text), maxlen=1) if part else None
        if not part or not matches:
            return None
        start, end = matches[0].span("answer" if "answer" in compiled.groupindex else min(compiled.groups, 1))
        return None if start < 0 else trimmed(sample.response, part.start + start, part.start + end)


CLOSED = ("yes", "no", "noanswer")
"""Answers that must match exactly and get no partial credit."""


class _NoPunctuation(dict[int, int | None]):
    """A table for str.translate that removes punctuation of all scripts. It is filled on demand."""

    def __missing__(self, code: int) -> int | None:
        self[code] = None if unicodedata.category(chr(code)).startswith("P") else code
        return self[code]


_NO_PUNCTUATION = _NoPunctuation(str.maketrans("", "", string.punctuation))


@dataclass(frozen=True)
class F1(Verifier):
    """Harmonic mean of precision and recall over the words that answer and label have in common, 0 to 1.

    >>> F1()(Sample(response="The Eiffel Tower, Paris", label="the eiffel tower"))
    0.8

    Rajpurkar et al. 2016, arXiv:1606.05250, sec. 6.1: in lower case, without punctuation and articles. Punctuation
    includes all scripts, as in MLQA (Lewis et al. 2020, arXiv:1910.07475). Accents are composed. If either side is
    yes, no or noanswer, the other must be the same (Yang et al. 2018, arXiv:1809.09600). Two empty sides are equal.
    """

    source: Source = "response"

    @any_label
    def explain(self, sample: Sample) -> Grade:
        label, answer = label_text(sample, "f1"), find(sample, self.source)
        if answer is None:
            return no_answer(SOURCE_NAMES[self.source], missing(sample, self.source))
        label_words, answer_words = words(label), words(answer.text)
        common = (Counter(label_words) & Counter(answer_words)).total()
        score = 2 * common / (len(label_words) + len(answer_words)) if common else float(label_words == answer_words)
        reason = f"{common} words in common: {len(answer_words)} given, {len(label_words)} in the label {quote(label)}"
        if label_words != answer_words and (" ".join(label_words) in CLOSED or " ".join(answer_words) in CLOSED):
            score, reason = 0.0, f"is not the label {quote(label)}, and yes, no and noanswer must match exactly"
        return Grade(score, SOURCE_NAMES[self.source], reason, answer.text, answer.span)

    def extract(self, sample: Sample) -> str | None:
        return text_of(find(sample, self.source))

    def same_answer(self, sample: Sample, first: str, second: str) -> bool:
        return words(first) == words(second)


def words(text: str) -> list[str]:
    """Normalised words: lower case, without punctuation and articles.

    >>> words("An apple; the Pear-tree's")
    ['apple', 'peartrees']
    """
    return re.sub(r"\b(?:a|an|the)\b", " ", composed(text).lower().translate(_NO_PUNCTUATION)).split()


@dataclass(frozen=True)
class Numeric(Verifier):
    r"""1.0 if the last number of the answer equals the label's, as numbers: 5.0 is 5, 042 is 42, 1 1/2 is 1.5.

    >>> Numeric()(Sample(response=r"It is \frac{1}{2} m/s^2.", label="0.5"))
    1.0

    `tolerance` is the largest accepted absolute difference. With `pattern` only what the first group of its last match
    captures is read, as in `####(.*)`. Raises RecordError for a label without a number.
    """

    source: Source = "response"
    tolerance: float = 0.0
    pattern: str | None = None

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.pattern or "()").groups
        except re.error as error:
            raise SettingsError(f"score.rm_options.pattern: not a regular expression: {error}") from None
        if not groups:
            raise SettingsError(f"score.rm_options.pattern: {self.pattern!r} has no group. Put the number into ( )")

    @any_label
    def explain(self, sample: Sample) -> Grade:
        label = label_text(sample, "numeric")
        expected = written_number(last_number(label) or "")
        if expected is None:
            raise RecordError(f"sample {sample.index}: label: {label[:60]!r} has no number to compare with")
        source = f"last number of the {SOURCE_NAMES[self.source]}"
        answer = self._find(sample)
        if answer is None:
            part = find(sample, self.source)
            reason = "no number there" if self.pattern is None else f"no number at {quote(self.pattern)}"
            return no_answer(source, missing(sample, self.source) if part is None else reason)
        value = written_number(answer.text)
        right = value is not None and abs(value - expected) <= Fraction(self.tolerance)
        return binary_grade(right, source, answer, label)

    def extract(self, sample: Sample) -> str | None:
        return text_of(self._find(sample))

    def same_answer(self, sample: Sample, first: str, second: str) -> bool:
        return first == second or written_number(first) == written_number(second) is not None

    def _find(self, sample: Sample) -> Span | None:
        part = find(sample, self.source)
        if part and self.pattern is not None:
            matches = deque(re.finditer(self.pattern, part.text), maxlen=1)
            if not matches or matches[0].start(1) < 0:
                return None
            part = Span(matches[0][1], part.start + matches[0].start(1))
        number = find_last_number(part.text) if part else None
        return Span(number.text, part.start + number.start) if part and number else None


@dataclass(frozen=True)
class Contains(Verifier):
    """1.0 if the label occurs in the answer, case-sensitive unless `ignore_case`. An empty label never occurs."""

    source: Source = "response"
    ignore_case: bool = False

    @any_label
    def explain(self, sample: Sample) -> Grade:
        label, answer = label_text(sample, "contains"), find(sample, self.source)
        if answer is None:
            return no_answer(SOURCE_NAMES[self.source], missing(sample, self.source))
        right = bool(label) and folded(label, self.ignore_case) in folded(answer.text, self.ignore_case)
        return binary_grade(right, SOURCE_NAMES[self.source], answer, label, ("contains", "does not contain"))

    def extract(self, sample: Sample) -> str | None:
        return text_of(find(sample, self.source))


@dataclass(frozen=True)
class Exact(Verifier):
    """1.0 if the answer equals the label, both stripped, case-sensitive unless `ignore_case`."""

    source: Source = "response"
    ignore_case: bool = False

    @any_label
    def explain(self, sample: Sample) -> Grade:
        label, answer = label_text(sample, "exact"), find(sample, self.source)
        if answer is None:
            return no_answer(SOURCE_NAMES[self.source], missing(sample, self.source))
        right = folded(answer.text, self.ignore_case) == folded(label, self.ignore_case)
        return binary_grade(right, SOURCE_NAMES[self.source], answer, label)

    def extract(self, sample: Sample) -> str | None:
        return text_of(find(sample, self.source))

    def same_answer(self, sample: Sample, first: str, second: str) -> bool:
        return folded(first, self.ignore_case) == folded(second, self.ignore_case)
