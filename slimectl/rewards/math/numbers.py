"""Exact parsing of written numbers."""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

from slimectl.rewards.base import Span

MAX_DIGITS = 1000
MAX_EXPONENT = 300
MAX_SEARCHED = 10_000
"""Characters at the end of a text that are searched for the last number."""

NEAR = 100
"""Characters at the end that usually contain the last number. They are searched first."""

_MINUS = str.maketrans(dict.fromkeys("−–‐‑‒﹣－⁻", "-"))
"""Signs of a number. A long dash (—) belongs to the sentence."""

_THOUSANDS = r"(?:,(?:\\!)?|\{,\}|\\[,!]|[\u00a0\u2007\u2009\u202f])"
"""Thousands separators: a comma, or a narrow blank of LaTeX or Unicode."""

_DIGITS = rf"(?:\d{{1,3}}(?:{_THOUSANDS}\d{{3}})+(?![\d,])|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{{1,4}})?"
_NUMBER = re.compile(rf"([-+]?)\s*({_DECIMAL})(?:\s*/\s*([-+]?)({_DECIMAL}))?")
_WORD = r"0-9A-Za-z_\u00c0-\u024f\u0370-\u052f"
"""Characters that form a word with a digit. Han, kana and Hangul need no blank before a number."""

_EXPONENT = r"(?:\^\{[-+]?\d{1,3}\}|\^[-+]?\d{1,3}|[-⁻]?[⁰¹²³⁴-⁹]{1,3})"
_TIMES_TEN = r"\s*(?:\\times|\\cdot|[×·*x])\s*10"
_FRACTION = r"\\[dt]?frac\{\s*\d{1,50}\s*\}\{\s*\d{1,50}\s*\}"
_FREE = r"(?<![\^_]\{)(?<!\^)(?<!\^[-+])(?<!\^\{[-+])"
"""Outside of exponents and indices: the 2 of cm^2 and the 1 of x_{1} do not count."""

_IN_TEXT = re.compile(
    rf"(?:(?<![{_WORD})}}.])(?<!\^)(?<!\^\{{)[-+])?{_FREE}"
    rf"(?:(?<![{_WORD}.]){_DECIMAL}(?:(?:{_TIMES_TEN})?{_EXPONENT}|/{_DECIMAL})?|{_FRACTION})"
)
_POWER = re.compile(rf"([-+]?)({_DECIMAL})({_TIMES_TEN})?\^([-+]?\d+)")
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", "{}")
_WHOLE_BEFORE = re.compile(r"(?<![\w.,/^])(?<!\d )[-+]?\d{1,9} ?$")
_MIXED = re.compile(r"([-+]?)(\d+) (\d+)/(\d+)")
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\overline\{(\d+)\}")


def exact_number(text: str) -> Fraction | None:
    r"""Parse the whole text as a number, None if it is not one: 1,234 · -3.50 · 3/4 · 1 1/2 · 1e3 · 0.\overline{3}.

    >>> exact_number("1,234.50"), exact_number("0.50") == exact_number("1/2"), exact_number("5 or 6")
    (Fraction(2469, 2), True, None)

    Numbers of over 1000 characters and exponents over 300 are rejected: parsing them costs too much.
    """
    text = text.strip().translate(_MINUS)
    if len(text) > MAX_DIGITS:
        return None
    if text.isdecimal():
        return Fraction(int(text))
    if repeating := _REPEATING.fullmatch(text):
        sign, before, fixed, period = repeating.groups()
        head, scale = int(before + fixed or "0"), 10 ** len(fixed)
        value = Fraction(head, scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
        return -value if sign == "-" else value
    if mixed := _MIXED.fullmatch(text):
        sign, *digits = mixed.groups()
        integer, top, bottom = map(int, digits)
        return (integer + Fraction(top, bottom)) * (-1 if sign == "-" else 1) if top < bottom else None
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, above, sign_below, below = match.groups()
    numerator, denominator = _decimal(above), _decimal(below or "1")
    if numerator is None or not denominator:
        return None
    value = numerator / denominator
    return -value if (sign == "-") != (sign_below == "-") else value


def written_number(text: str) -> Fraction | None:
    r"""Parse a number that `find_last_number` may find: like `exact_number`, and \frac{3}{4}, 2^{10}, 3 \times 10^8.

    >>> written_number(r"1\frac{1}{2}"), written_number("2.5×10⁻¹"), written_number("-2^2")
    (Fraction(3, 2), Fraction(1, 4), Fraction(-4, 1))
    """
    text = text.strip().translate(_MINUS)
    fraction = re.sub(rf"\s?({_FRACTION})$", lambda match: " " + "/".join(re.findall(r"\d+", match[1])), text)
    flat = re.sub(r"(?<=\d)([-⁻]?[⁰¹²³⁴-⁹]+)$", r"^\1", text).translate(_RAISED)
    power = _POWER.fullmatch(flat)
    if power is None:
        return exact_number(re.sub(r"([-+]) ", r"\1", fraction))
    sign, factor, times_ten, exponent = power.groups()
    base, value = (Fraction(10), _decimal(factor)) if times_ten else (_decimal(factor), Fraction(1))
    if base is None or value is None or abs(int(exponent)) > MAX_EXPONENT or (base == 0 and int(exponent) < 0):
        return None
    return value * base ** int(exponent) * (-1 if sign == "-" else 1)


def find_last_number(text: str) -> Span | None:
    """Find the last number of a text, as written, or None. A minus after a digit is not its sign.

    >>> find_last_number("From 5-3 follows $1,234.50.")
    Span(text='1,234.50', start=18)
    """
    before = max(0, len(text) - MAX_SEARCHED)
    searched = text[before:].translate(_MINUS)
    near = max(0, searched.rfind(" ", 0, max(0, len(searched) - NEAR)))
    matches = deque(_IN_TEXT.finditer(searched, near), maxlen=1)
    if near and (not matches or matches[0].start() - near < len(r" \times 10^")):  # it may begin before
        matches = deque(_IN_TEXT.finditer(searched), maxlen=1)
    if not matches:
        return None
    start, end = matches[0].span()
    is_fraction = "/" in matches[0][0] or "frac" in matches[0][0]
    if is_fraction and (whole := _WHOLE_BEFORE.search(searched, max(0, start - 12), start)):
        start = whole.start()  # 1 1/2
    start, end = before + start, before + end
    return Span(text[start:end].rstrip("."), start)


def last_number(text: str) -> str | None:
    """The text of `find_last_number`."""
    span = find_last_number(text)
    return None if span is None else span.text


def _decimal(text: str) -> Fraction | None:
    exponent = re.search(r"[eE]([-+]?\d+)$", text)
    if exponent and abs(int(exponent[1])) > MAX_EXPONENT:
        return None
    return Fraction(re.sub(_THOUSANDS, "", text))
