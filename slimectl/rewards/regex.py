"""The answer is found by a pattern."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from slimectl.errors import RecordError, SettingsError
from slimectl.rewards.extraction import Source, label_text, read
from slimectl.types import Sample


@dataclass(frozen=True)
class Regex:
    r"""With a `pattern`, 1.0 if its last match captures the label; without, if the label is a pattern that is found.

    >>> Regex(pattern=r"Answer:\s*(\w+)").extract(Sample(response="Answer: A. No, wait. Answer: B"))
    'B'

    What is captured is the group `answer`, else the first group, else the whole match; compared stripped. Raises
    SettingsError for a pattern that is none, RecordError for a label that is none.
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

    def __call__(self, sample: Sample) -> float:
        label, answer = label_text(sample, "regex"), self.extract(sample)
        if answer is None:
            return 0.0
        if self.pattern is None:
            return 1.0
        return float(answer.casefold() == label.casefold() if self.ignore_case else answer == label)

    def extract(self, sample: Sample) -> str | None:
        text = read(sample, self.source)
        pattern = label_text(sample, "regex") if self.pattern is None else self.pattern
        try:
            compiled = re.compile(pattern, re.IGNORECASE if self.ignore_case else 0)
        except re.error as error:
            raise RecordError(f"sample {sample.index}: label: no regular expression: {error}") from None
        matches = deque(compiled.finditer(text or ""), maxlen=1)
        if not matches:
            return None
        found = matches.pop()
        captured = found["answer"] if "answer" in compiled.groupindex else found[1 if compiled.groups else 0]
        return None if captured is None else str(captured).strip()
