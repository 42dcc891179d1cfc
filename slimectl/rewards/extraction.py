"""Extracts answers from responses and labels as text, and normalises their spelling."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeVar

from slimectl.errors import RecordError
from slimectl.rewards.base import Grade, Span, Verifier
from slimectl.rewards.thoughts import OPENED, answer_start
from slimectl.types import Sample, text_of_label

V = TypeVar("V", bound=Verifier)
Source = Literal["response", "last_line", "boxed", "answer_tag", "with_thought"]
SOURCE_NAMES: dict[Source, str] = {
    "response": "response",
    "last_line": "last line",
    "boxed": r"last \boxed{}",
    "answer_tag": "last <answer> tag",
    "with_thought": "response with its thought",
}
"""Names of the sources in explanations."""

UNCLOSED = "the thought never closes, so there is no answer"
"""The reason for a reward of 0 if the last thought never closes."""

FULL_STOPS = ".。．｡।॥۔։።"
"""Full stops of other scripts."""

QUOTES = "\"'`“”„‟‘’‚‛«»‹›「」『』｢｣〝〞〟＂＇"
_FINAL_STOP = re.compile(rf"(?<![{FULL_STOPS}])[{FULL_STOPS}]\s*$")

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def trimmed(text: str, start: int = 0, end: int | None = None) -> Span:
    """`text[start:end]` without surrounding white space."""
    part = text[start:end]
    return Span(part.strip(), start + len(part) - len(part.lstrip()))


def find_boxed(text: str) -> Span | None:
    r"""Return the content of the last \boxed{} or \fbox{}, or None if there is no box or it never closes.

    >>> find_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
    Span(text='\\frac{1}{2}', start=25)

    A truncated last box is not replaced by an earlier one: the model had not finished answering.
    """
    boxes = deque(_BOX.finditer(text), maxlen=1)
    if not boxes:
        return None
    opening = boxes.pop()
    depth, at = 1, opening.end()
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return trimmed(text, opening.end(), at)
        at += 1
    return None


def find_last_line(text: str) -> Span | None:
    """Return the last line that is not blank, stripped, or None."""
    stripped = text.rstrip()
    return trimmed(stripped, stripped.rfind("\n") + 1) if stripped else None


def find_tagged(text: str, tag: str = "answer") -> Span | None:
    """Return the text between the last closed <tag> and its </tag>, stripped, or None."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else trimmed(text, start + len(tag) + 2, end)


def find(sample: Sample, source: Source) -> Span | None:
    """Return the part of the response that `source` selects, or None if it is absent.

    Only `with_thought` includes the reasoning. The others search the answer, which begins at `answer_start`.
    """
    response = sample.response
    start = 0 if source == "with_thought" else answer_start(sample)
    if start < 0:
        return None
    if source in ("response", "with_thought"):
        return trimmed(response, start)
    part = _FINDERS[source](response[start:])
    return Span(part.text, start + part.start) if part and start else part


_FINDERS = {"last_line": find_last_line, "boxed": find_boxed, "answer_tag": find_tagged}


def with_response(sample: Sample, response: str) -> Sample:
    """Copy the sample with a part of its answer as the response, for another verifier."""
    return replace(sample, response=response, metadata=sample.metadata | {OPENED: ""})


def last_boxed(text: str) -> str | None:
    """Return the text of `find_boxed`."""
    return text_of(find_boxed(text))


def text_of(span: Span | None) -> str | None:
    return None if span is None else span.text


def missing(sample: Sample, source: Source) -> str:
    """Return why no answer was found in `source`."""
    if source != "with_thought" and answer_start(sample) < 0:
        return UNCLOSED
    return {
        "response": "the response is empty",
        "last_line": "the response has only blank lines",
        "boxed": r"no \boxed{} or \fbox{}, or the last one never closes",
        "answer_tag": "no closed <answer> tag",
        "with_thought": "the response is empty",
    }[source]


def label_text(sample: Sample, wanted_by: str) -> str:
    """Return the label as composed text: 72.0 becomes "72". Raises RecordError if missing, a list or an object."""
    label = sample.label
    if isinstance(label, list | dict):
        kind = "a list" if isinstance(label, list) else "an object"
        raise RecordError(
            f"sample {sample.index}: label: {kind}, but the {wanted_by} verifier needs a string or a number. Select a "
            "part of it with rollout.label_key, or set score.custom_rm_path."
        )
    if label is None:
        raise RecordError(f"sample {sample.index}: label: missing, but the {wanted_by} verifier needs it")
    return composed(text_of_label(label).strip())


def any_label(explain: Callable[[V, Sample], Grade]) -> Callable[[V, Sample], Grade]:
    """Let a verifier accept any label of a list. The best grade counts, and the first of equal grades.

    Raises RecordError for an empty list, and for an entry that is not a string or a number.
    """

    @functools.wraps(explain)
    def explain_best(self: V, sample: Sample) -> Grade:
        labels = sample.label
        if not isinstance(labels, list):
            return explain(self, sample)
        if not labels or not all(isinstance(label, str | int | float) for label in labels):
            fault = "contains something other than strings and numbers" if labels else "is empty"
            raise RecordError(f"sample {sample.index}: label: the list of accepted answers {fault}")
        grades = [explain(self, replace(sample, label=label)) for label in labels]
        place = max(range(len(grades)), key=lambda i: _score(grades[i]))
        best = grades[place]
        if best.extracted is None:
            return best
        return replace(best, why=f"{best.why} (label {place + 1} of {len(labels)})")

    return explain_best


def _score(grade: Grade) -> float:
    reward = grade.reward
    return float(reward["score"] if isinstance(reward, dict) else reward or 0.0)


def composed(text: str) -> str:
    """Compose accents with their letters, and Hangul syllables (Unicode's form NFC)."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def bare(text: str) -> str:
    """Remove the quotation marks around a text and one final full stop, before or after them.

    >>> [bare(text) for text in ("“Paris.”", "「5」。", "5...")]
    ['Paris', '5', '5...']
    """
    text = _FINAL_STOP.sub("", text.strip())
    if len(text) > 1 and text[0] in QUOTES and text[-1] in QUOTES:
        text = _FINAL_STOP.sub("", text[1:-1].strip())
    return text
