"""Reads times of day, in 12 and 24 hours."""

from __future__ import annotations

import re

_TIME = re.compile(
    r"(?P<hour>\d{1,2})\s?(?::\s?(?P<minute>[0-5]\d)(?:\s?:\s?(?P<second>[0-5]\d))?)?\s?"
    r"(?P<half>(?P<dotted>[ap]\.\s?m)\.?|[ap]m|in the (?:morning|afternoon|evening)|at night|o'?clock)",
    re.IGNORECASE,
)
_NAMED = {"noon": "12:00:00", "midnight": "0:00:00"}


def time_of_day(text: str) -> str:
    """Return a time in 24 hours with seconds, with "~" before it if it may be a.m. or p.m.

    >>> [time_of_day(text) for text in ("2:30 PM", "12:05 a.m.", "2 o'clock", "noon", "2:30", "5am")]
    ['14:30:00', '0:05:00', '~2:00:00', '12:00:00', '', '']

    Other texts give "". So does a bare pair of numbers, which may be a ratio, and 5am, which is a product.
    """
    if text[-1:] not in "mMnNtTgGkK.}":
        return ""
    plain = re.sub(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", text)
    plain = re.sub(r"[\s~]+", " ", plain).strip()
    match = _TIME.fullmatch(plain)
    if match is None:
        return _NAMED.get(plain.lower().removeprefix("12 "), "")
    hour, half = int(match["hour"]), match["half"].lower()
    is_product = half in ("am", "pm") and match["minute"] is None and plain == text and match["half"].islower()
    if is_product or hour > (24 if "clock" in half else 12):
        return ""
    sign = ""
    if "clock" in half:
        sign = "~" if 1 <= hour <= 12 else ""
    elif half[0] == "p" or half in ("in the afternoon", "in the evening") or (half == "at night" and hour != 12):
        hour = hour % 12 + 12
    elif half[0] in "a" or half == "in the morning":
        hour %= 12
    return f"{sign}{hour}:{match['minute'] or '00'}:{match['second'] or '00'}"
