"""Distinguishes thousands separators (1,234) from separators between list items (1, 234)."""

from __future__ import annotations

import re

_RUN = re.compile(r"(?<![\w.,])\d+(?:,\d{1,3})+(?!\d)")
"""Digits and commas without blanks: one number or several."""

_COMMAS = re.compile(r"\d{1,3}(?:,\d{3})+")
_BLANKS = re.compile(
    r"(?:^|(?<=[-+=($,\[{≈] )|(?<=[-+=($,\[{≈]))\d{1,3}(?: \d{3})+(?:\.\d+)?(?![\w/]|,\d|\s*(?:\d|\\frac\s*\{?\d))"
)
_APOSTROPHES = re.compile(r"(?<![\w.,'])\d{1,3}(?:'\d{3})+(?![\w'])|(?<![\w.,'])\d{1,3}(?:\\?_\d{3})+(?!\w)")
_SPACED = re.compile(r";|, |,(?=[^,;=]{1,20}=)")
"""A separator that cannot be a thousands separator: a blank, or a name and an equals sign, follows it."""

_ZERO_FIRST = re.compile(r"\d{1,3}(?:,0\d\d)+(?:,\d{3})*")
"""1,050: an item of a list is never written 050."""


def ungrouped(text: str) -> str:
    r"""Remove the thousands separators from numbers, and put a blank after every other comma between digits.

    >>> [ungrouped(text) for text in ("1,234 miles", "(1,000, 2)", "(1,234)", "1,234,5", "1 234")]
    ['1234 miles', '(1000, 2)', '(1, 234)', '1, 234, 5', '1234']

    In a tuple, a set or the arguments of a function a comma separates items. It does not if 0 follows it, or if the
    other commas have blanks after them and this one has none.
    """
    if "," in text and _RUN.search(text):
        masked = _RUN.sub(lambda run: "0" * len(run[0]) if _COMMAS.fullmatch(run[0]) else run[0], text)
        text = _RUN.sub(lambda run: _number_or_items(run, masked), text)
    if "'" in text or "_" in text:
        text = _APOSTROPHES.sub(lambda run: re.sub(r"\D", "", run[0]), text)
    return _BLANKS.sub(lambda run: run[0].replace(" ", ""), text) if " " in text else text


def _number_or_items(run: re.Match[str], masked: str) -> str:
    is_number = _COMMAS.fullmatch(run[0]) is not None
    if is_number and not _separates(masked, *run.span()):
        return run[0].replace(",", "")
    numbers = _ZERO_FIRST.sub(lambda number: number[0].replace(",", ""), run[0])
    return re.sub(",", ", ", numbers)


def _separates(masked: str, start: int, end: int) -> bool:
    """Whether commas within the digits at `start` separate items. `masked` is the text without these commas."""
    opening, depth = -1, 0
    for at in range(start - 1, -1, -1):
        depth += (masked[at] in ")]}") - (masked[at] in "([{")
        if depth < 0:
            opening = at
            break
    others, depth = [], 0
    for at in range(opening + 1, len(masked)):
        depth += (masked[at] in "([{") - (masked[at] in ")]}")
        if depth < 0:
            break
        if depth == 0 and masked[at] in ",;":
            others.append(_SPACED.match(masked, at) is not None)
    if others:
        return not all(others)
    before = masked[:opening].rstrip()[-1:] if opening > 0 else ""
    is_collection = opening >= 0 and (masked[opening] != "{" or before == "\\")
    return is_collection and before not in tuple("+-*/^0123456789}")
