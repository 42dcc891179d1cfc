"""Where in a response the answer stands, and what the label is."""

from __future__ import annotations

import re
from collections import deque
from typing import Literal

from slimectl.errors import RecordError
from slimectl.types import Sample

Source = Literal["response", "last_line", "boxed", "answer_tag"]
SOURCES: tuple[Source, ...] = ("response", "last_line", "boxed", "answer_tag")

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{} or \fbox{} holds, nested braces and all; None if there is none or it never closes.

    >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'

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
                return text[opening.end() : at].strip()
        at += 1
    return None


def last_line(text: str) -> str | None:
    """The last line that is not blank, stripped; None if there is none."""
    return text.rstrip().rpartition("\n")[2].strip() or None


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """What stands between the last <tag> that is closed and its </tag>, stripped; None if there is none."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def read(sample: Sample, source: Source) -> str | None:
    """The part of the response that `source` names; None where it is not there."""
    if source == "response":
        return sample.response.strip()
    if source == "last_line":
        return last_line(sample.response)
    return last_boxed(sample.response) if source == "boxed" else last_tagged(sample.response)


def label_text(sample: Sample, wanted_by: str) -> str:
    """The label as text: 72.0 reads "72". Raises RecordError if there is none."""
    label = sample.label
    if label is None:
        raise RecordError(f"sample {sample.index}: label: missing, and the {wanted_by} verifier compares with it")
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label).strip()
