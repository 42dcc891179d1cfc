"""Where in a response the answer stands, and what the label is."""

from __future__ import annotations

import re
from collections import deque
from typing import Literal

from slimectl.errors import RecordError
from slimectl.rewards.verdict import Found
from slimectl.types import Sample

Source = Literal["response", "last_line", "boxed", "answer_tag"]
SOURCES: tuple[Source, ...] = ("response", "last_line", "boxed", "answer_tag")
SOURCE_WORDS: dict[Source, str] = {
    "response": "whole response",
    "last_line": "last line",
    "boxed": r"last \boxed{}",
    "answer_tag": "last <answer> tag",
}
"""The sources as explanations call them."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def trimmed(text: str, start: int = 0, end: int | None = None) -> Found:
    """`text[start:end]` without the blanks around it."""
    part = text[start:end]
    return Found(part.strip(), start + len(part) - len(part.lstrip()))


def find_boxed(text: str) -> Found | None:
    r"""What the last \boxed{} or \fbox{} holds, nested braces and all; None if there is none or it never closes.

    >>> find_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
    Found(text='\\frac{1}{2}', start=25)

    An earlier box is not fallen back on when the last one is cut off: the model had not finished answering.
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


def find_last_line(text: str) -> Found | None:
    """The last line that is not blank, stripped; None if there is none."""
    kept = text.rstrip()
    return trimmed(kept, kept.rfind("\n") + 1) if kept else None


def find_tagged(text: str, tag: str = "answer") -> Found | None:
    """What stands between the last <tag> that is closed and its </tag>, stripped; None if there is none."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else trimmed(text, start + len(tag) + 2, end)


def find(sample: Sample, source: Source) -> Found | None:
    """The part of the response that `source` names; None where it is not there."""
    if source == "response":
        return trimmed(sample.response)
    if source == "last_line":
        return find_last_line(sample.response)
    return find_boxed(sample.response) if source == "boxed" else find_tagged(sample.response)


def last_boxed(text: str) -> str | None:
    """The text of `find_boxed`."""
    return text_of(find_boxed(text))


def text_of(found: Found | None) -> str | None:
    return None if found is None else found.text


def missing(source: Source) -> str:
    """Why nothing was found where `source` says."""
    return {
        "response": "the response is empty",
        "last_line": "the response has no line that is not blank",
        "boxed": r"no \boxed{} or \fbox{}, or the last one never closes",
        "answer_tag": "no <answer> tag that is closed",
    }[source]


def label_text(sample: Sample, wanted_by: str) -> str:
    """The label as text: 72.0 reads "72". Raises RecordError if there is none."""
    label = sample.label
    if label is None:
        raise RecordError(f"sample {sample.index}: label: missing, and the {wanted_by} verifier compares with it")
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label).strip()
