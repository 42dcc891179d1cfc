"""Normalises answers in LaTeX or plain text, and parses lists, sets, tuples and intervals."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from slimectl.rewards.math.numbers import exact_number

MAX_DEPTH = 6
MAX_ITEMS = 64

_CHARACTERS = str.maketrans({"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ",
                             "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
                             "±": r"\pm ", "²": "^2", "³": "^3", "\xa0": " ", "°": r"^\circ "})  # fmt: skip
_LETTERS = "m|s|g|h|l|L"
_AMBIGUOUS = "in|mi|mg|ms|ml|mL"
_WORDS = (
    r"mm|cm|dm|km|inch(?:es)?|f(?:oo|ee)?t|y(?:ar)?ds?|miles?|kg|lbs?|oz|ounces?|(?:kilo|milli)?grams?|pounds?|tons?"
    r"|sec(?:ond)?s?|min(?:ute)?s?|h(?:ou)?rs?|days?|weeks?|months?|years?|(?:milli)?lit(?:er|re)s?|gallons?"
    r"|(?:centi|milli|kilo)?met(?:er|re)s?|deg(?:ree)?s?|rad(?:ian)?s?|dollars?|cents?|USD|euros?|units?|percent|mph|Hz"
)
_POWER = r"(?:\s*\^\s*(?:\d|\{-?\d\}))?"
_WORD = rf"(?:{_WORDS}|{_AMBIGUOUS}|{_LETTERS})(?![A-Za-z]){_POWER}"
_UNIT = rf"(?:(?:square|cubic|sq\.?|cu\.?)\s+)?{_WORD}(?:\s*(?:/|per|\*|\\cdot)\s*{_WORD})?\.?"
_TEXT = r"\\(?:text(?:bf|it|rm|sf|normal)?|mathrm|mathbf|mathit|mathsf|mbox|hbox|emph)\s*\{([^{}]*)\}"
_ROMAN = r"\\(?:text(?:rm|bf|it)?|mbox)"
_FUNCTIONS = r"(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|and|or)\b"
_NAME = r"\\?[A-Za-z]{1,12}(?:_(?:\w|\{\w+\}))?'?(?:\s*\(\s*\w\s*\))?"
_ASSIGNED = re.compile(rf"\s*({_NAME})\s*(?:=|\\in(?![a-z])|\\approx)\s*(.+)", re.DOTALL)

_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![A-Za-z])", ""),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"(?<=\d)(?:\{,\}|,\\!|\\,|\\!|\\ |\\thinspace )\s*(?=\d{3}(?!\d))", ""),  # thousands
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:[,;:!> ]|q?quad(?![A-Za-z]))|~", " "),
        (r"\\\(|\\\)|\\\[|\\\]|\\?\$|[£€]", ""),
        (r"\s*\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", " "),
        (r"\\?%", ""),
        (r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}|,?\s+(?:and|or)\s+", ", "),
        (rf"(?<=[\w}})\]])\s*\\(?:text|mathrm|mbox|textrm)\s*\{{\s*{_UNIT}\s*\}}{_POWER}\s*$", ""),
        # Any words after a number name the counted objects.
        (rf"(?<=\d)\s*\\frac\s*\{{\s*{_TEXT}\s*\}}\s*\{{\s*{_TEXT}\s*\}}\s*$", ""),
        (rf"(?<=[\d}})\]])\s*{_ROMAN}\s*\{{[^{{}}]*\}}{_POWER}\s*$", ""),
        (_TEXT, r"\1"),
        (rf"^([-+]?[\d.,/]+)\s+{_UNIT}\s*$", r"\1"),
        (rf"(?<=[\d}})])\s+(?:{_WORDS})(?![A-Za-z]){_POWER}\s*$", ""),
        (rf"(?<=\d)(?:{_WORDS})(?![A-Za-z]){_POWER}\s*$", ""),  # 5cm; but 5m may be five times m, and 2mg a force
        (rf"^([-+]?[\d.,/]+)\s+(?!{_FUNCTIONS})[A-Za-z][A-Za-z ]{{2,}}\.?$", r"\1"),
        (r"\s+", " "),
        (r"\\ne\s*q?(?![A-Za-z])", r"\\ne "),
        (r"\\([lg])eq(?![A-Za-z])", r"\\\1e"),
    )
)


@dataclass(frozen=True)
class Answer:
    """A leaf (a number, an expression, words), or the items of a list, set, union, tuple or interval.

    `brackets` of a tuple or interval are its first and last character; a union has "∪"; a list or a set has "".
    """

    text: str
    kind: Literal["leaf", "unordered", "ordered"] = "leaf"
    brackets: str = ""
    items: tuple[Answer, ...] = ()


def normalized(text: str) -> str:
    r"""Remove all that does not change the value: sizes, spaces, units, \%, degrees, \text, thousands separators.

    >>> [normalized(text) for text in (r"5\text{ cm}", r"1{,}234", r"50\%", r"90^\circ", r"\text{Yes}.")]
    ['5', '1234', '50', '90', 'Yes']
    """
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text.strip())
    text = text.strip().rstrip(".").strip()
    if re.fullmatch(r"[-+]?\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?", text):
        text = re.sub(r"[, ]", "", text)
    return text


def split_assignment(text: str) -> tuple[str, str] | None:
    """Split `name = value` into name and value; None if the text is no assignment."""
    match = _ASSIGNED.fullmatch(text)
    return (match[1].replace(" ", ""), match[2].strip()) if match and "=" not in match[2] else None


def parse_structure(text: str, depth: int = 0) -> Answer:
    """Parse the structure of a normalised answer; beyond 6 levels or 64 items it is a leaf."""
    text = text.strip()
    for _ in range(MAX_ITEMS):
        if not text.startswith("(") or _closes_at(text) != len(text) - 1 or len(_split(text[1:-1])) > 1:
            break
        text = text[1:-1].strip()
    if depth == MAX_DEPTH or "matrix}" in text:
        return Answer(text)
    if len(union := _split(text, r"\cup")) > 1:
        return _build_answer(text, "unordered", "∪", union, depth)
    if text.startswith(r"\{") and text.endswith(r"\}") and _closes_at(text) == len(text) - 1:
        return _build_answer(text, "unordered", "", _split(text[2:-2]), depth)
    if text[:1] in ("(", "[") and _closes_at(text) == len(text) - 1 and len(pair := _split(text[1:-1])) > 1:
        return _build_answer(text, "ordered", text[0] + text[-1], pair, depth)
    if len(listed := _split(text)) > 1:
        return _build_answer(text, "unordered", "", listed, depth)
    if text.count(r"\pm") == 1:
        values = [re.sub(r"\\pm\s*", sign, text).strip().removeprefix("+") for sign in "+-"]
        return _build_answer(text, "unordered", "", values, depth)
    return Answer(text)


def _build_answer(
    text: str, kind: Literal["unordered", "ordered"], brackets: str, parts: list[str], depth: int
) -> Answer:
    if len(parts) > MAX_ITEMS:
        return Answer(text)
    pairs = [split_assignment(part) for part in parts]
    if all(pairs) and len({pair[0] for pair in pairs if pair}) == 1:  # x=1, x=2; but x=1, y=2 keeps its names
        parts = [pair[1] for pair in pairs if pair]
    items = tuple(parse_structure(part, depth + 1) for part in parts)
    return items[0] if kind == "unordered" and len(items) == 1 else Answer(text, kind, brackets, items)


def right_hand_side(text: str) -> str:
    """The right side of `x = 5`, `x \\in [1,2]`, `x = 2 + 3 = 5` and `2 + 3 = 5`; any other text unchanged."""
    if pair := split_assignment(text):
        return pair[1]
    sides = [side.strip() for side in re.split(r"=|\\approx", text)]
    if len(sides) > 1 and all(sides) and len(_split(text)) == 1:
        middle = sides[1:-1] if re.fullmatch(_NAME, sides[0]) else sides[:-1]
        if not any(re.search(r"(?<![\\A-Za-z])[A-Za-z]|[<>]", side) for side in middle):
            return sides[-1]
    return text


def _closes_at(text: str) -> int:
    """Index at which the text's opening bracket closes; -1 if it never does. Any closing bracket matches: [1, 2)."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ")]}":
            return at
    return -1


def _split(text: str, separator: str = ",") -> list[str]:
    """Split at separators (`,` and `;` alike) outside all brackets."""
    if exact_number(text) is not None:
        return [text]
    parts, start, depth, at = [], 0, 0, 0
    while at < len(text):
        character = text[at]
        depth += (character in "([{") - (character in ")]}")
        is_separator = character in ",;" if separator == "," else text.startswith(separator, at)
        if is_separator and depth == 0:
            parts.append(text[start:at].strip())
            start = at + len(separator)
        at += 1
    parts.append(text[start:].strip())
    return parts if all(parts) else [text]
