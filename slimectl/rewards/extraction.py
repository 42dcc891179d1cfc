"""Answer extraction from responses, and labels as text."""

from __future__ import annotations

import re
from collections import deque
from typing import Literal

from slimectl.errors import RecordError
from slimectl.rewards.base import Span
from slimectl.types import Sample, text_of_label

Source = Literal["response", "last_line", "boxed", "answer_tag"]
SOURCES: tuple[Source, ...] = ("response", "last_line", "boxed", "answer_tag")
SOURCE_WORDS: dict[Source, str] = {
    "response": "whole response",
    "last_line": "last line",
    "boxed": r"last \boxed{}",
    "answer_tag": "last <answer> tag",
}
"""Names of the sources in explanations."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def trimmed(text: str, start: int = 0, end: int | None = None) -> Span:
    """`text[start:end]` without surrounding white space."""
    part = text[start:end]
    return Span(part.strip(), start + len(part) - len(part.lstrip()))


def find_boxed(text: str) -> Span | None:
    r"""Content of the last \boxed{} or \fbox{}, nested braces included; None if there is none or it never closes.

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
    """The last line that is not blank, stripped; None if there is none."""
    stripped = text.rstrip()
    return trimmed(stripped, stripped.rfind("\n") + 1) if stripped else None


def find_tagged(text: str, tag: str = "answer") -> Span | None:
    """Text between the last closed <tag> and its </tag>, stripped; None if there is none."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else trimmed(text, start + len(tag) + 2, end)


def find(sample: Sample, source: Source) -> Span | None:
    """The part of the response that `source` names; None if it is absent."""
    if source == "response":
        return trimmed(sample.response)
    if source == "last_line":
        return find_last_line(sample.response)
    return find_boxed(sample.response) if source == "boxed" else find_tagged(sample.response)


def last_boxed(text: str) -> str | None:
    """The text of `find_boxed`."""
    return text_of(find_boxed(text))


def text_of(span: Span | None) -> str | None:
    return None if span is None else span.text


def missing(source: Source) -> str:
    """The reason why extraction from `source` found no answer."""
    return {
        "response": "the response is empty",
        "last_line": "the response has no line that is not blank",
        "boxed": r"no \boxed{} or \fbox{}, or the last one never closes",
        "answer_tag": "no <answer> tag that is closed",
    }[source]


def label_text(sample: Sample, wanted_by: str) -> str:
    """The label as text: 72.0 becomes "72". Raises RecordError if there is none, or a list or an object."""
    label = sample.label
    if isinstance(label, list | dict):
        kind = "a list" if isinstance(label, list) else "an object"
        raise RecordError(
            f"sample {sample.index}: label: {kind}, and the {wanted_by} verifier "
            f"compares with a string or a number; name a part of it by rollout.label_key, or grade by "
            f"score.custom_rm_path"
        )
    if label is None:
        raise RecordError(f"sample {sample.index}: label: missing, and the {wanted_by} verifier compares with it")
    return text_of_label(label).strip()
