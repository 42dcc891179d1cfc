"""Regular-expression match of the answer."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from slimectl.errors import RecordError, SettingsError
from slimectl.rewards.extraction import SOURCE_WORDS, Source, find, label_text, missing, text_of, trimmed
from slimectl.rewards.verdict import Found, Verdict, Verifier, graded, nothing, shown
from slimectl.types import Sample


@dataclass(frozen=True)
class Regex(Verifier):
    r"""With a `pattern`, 1.0 if its last match captures the label; without, if the label matches as a pattern.

    >>> Regex(pattern=r"Answer:\s*(\w+)").extract(Sample(response="Answer: A. No, wait. Answer: B"))
    'B'

    The captured answer is the group `answer`, else the first group, else the whole match; compared stripped. Raises
    SettingsError for an invalid pattern, RecordError for a label that is an invalid pattern. Some patterns, such as
    (a+)+$, take exponential time on some texts: the time limit holds for them only in worker processes (score.workers).
    """

    pattern: str | None = None
    source: Source = "response"
    ignore_case: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise SettingsError(
                f"score.rm_options.pattern: {self.pattern!r} is no regular expression: {error}"
            ) from None

    def explain(self, sample: Sample) -> Verdict:
        label, answer = label_text(sample, "regex"), self._find(sample)
        pattern = label if self.pattern is None else self.pattern
        source = f"last match in the {SOURCE_WORDS[self.source]}"
        if answer is None:
            absent = find(sample, self.source) is None
            return nothing(source, missing(self.source) if absent else f"no match of {shown(pattern)}")
        if self.pattern is None:
            return Verdict(1.0, source, f"the label {shown(label)} matches", answer.text, answer.span)
        right = answer.text.casefold() == label.casefold() if self.ignore_case else answer.text == label
        return graded(right, source, answer, label)

    def extract(self, sample: Sample) -> str | None:
        return text_of(self._find(sample))

    def _find(self, sample: Sample) -> Found | None:
        part = find(sample, self.source)
        pattern = label_text(sample, "regex") if self.pattern is None else self.pattern
        try:
            compiled = re.compile(pattern, re.IGNORECASE if self.ignore_case else 0)
        except re.error as error:
            raise RecordError(f"sample {sample.index}: label: no regular expression: {error}") from None
        matches = deque(compiled.finditer(part.text), maxlen=1) if part else None
        if not part or not matches:
            return None
        start, end = matches[0].span("answer" if "answer" in compiled.groupindex else min(compiled.groups, 1))
        return None if start < 0 else trimmed(sample.response, part.start + start, part.start + end)
