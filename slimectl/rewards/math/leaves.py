"""The normal form of answers, and a parser for answers without parts: numbers, expressions, ratios, words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from slimectl.rewards.math.expressions import Tree, parse_expression
from slimectl.rewards.math.regions import Region
from slimectl.rewards.math.times import time_of_day
from slimectl.rewards.math.tokens import FUNCTIONS
from slimectl.rewards.math.units import Unit, unit_behind, without_unit

Kind = Literal[
    "scalar", "words", "text", "list", "tuple", "region", "matrix", "numeral", "ratio", "equation", "relation", "time"
]

_NUMERAL = re.compile(r"\(?\s*([0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?)\s*\)?\s*_\s*(?:\{\s*(\d{1,2}|[a-z]+)\s*\}|(\d{1,2}))")
_RATIO = re.compile(r"[^:]+(?::[^:]+){1,4}")
_DERIVATIVE = re.compile(r"\\frac\s*\{\s*d[^{}]*\}\s*\{\s*d\s*[a-z]|\bd[a-z]?/d[a-z]\b")
"""Text that is not a quotient of products, whatever its letters are."""

_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_COUNTS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty"""
_NUMBER_WORDS = {word: str(at) for at, word in enumerate(_COUNTS.split())} | {
    "half": "1/2",
    "one half": "1/2",
    "one-half": "1/2",
}


@dataclass(frozen=True)
class MathAnswer:
    r"""One answer. `text` is its normalized spelling, and a "text" has nothing else.

    scalar: `tree` · list (a set too): unordered `items` · tuple, an interval too: `items` and `brackets` ("[)") ·
    region: `region`, of the variable `name` if it has one · matrix: `items` of `items` · numeral: `text`, digits and
    base · ratio: `items`, and in `brackets` the time that it may be · time: `text` of `time_of_day` · equation: `sides`
    · relation: `sides`, `operators`. `name` is the left side of x = 5. `alternatives` are other values of an
    approximation. `unit` is the unit of a scalar, if known.
    """

    kind: Kind
    text: str
    items: tuple[MathAnswer, ...] = ()
    brackets: str = ""
    tree: Tree | None = None
    region: Region | None = None
    sides: tuple[Tree, ...] = ()
    operators: tuple[str, ...] = ()
    name: str = ""
    alternatives: tuple[MathAnswer, ...] = ()
    unit: Unit | None = None


def parse_leaf(text: str) -> MathAnswer:
    """A scalar, a numeral, a ratio, words, or text."""
    if time := time_of_day(text):
        return MathAnswer("time", time)
    written = text
    text = without_unit(text)
    if not text:
        return MathAnswer("text", text)
    folded = re.sub(r"\s+", " ", text).casefold()
    if folded in _NUMBER_WORDS:
        return MathAnswer("scalar", text, tree=parse_expression(_NUMBER_WORDS[folded]))
    if are_words(text):
        return MathAnswer("words", text)
    if numeral := _NUMERAL.fullmatch(re.sub(r"\\_", "_", text)):
        base = _BASES.get(numeral[2], numeral[2]) if numeral[2] else numeral[3]
        if str(base) != "10":
            return MathAnswer("numeral", f"{numeral[1].lstrip('0').upper() or '0'}_{base}")
        text = numeral[1]
    if _RATIO.fullmatch(text) and len(parts := split(text, ":")) > 1:
        items = tuple(MathAnswer("scalar", part, tree=parse_expression(part)) for part in parts)
        if not all(item.tree for item in items):
            return MathAnswer("text", text)
        return MathAnswer("ratio", text, items, time_of_day(text + " o'clock") or "")
    tree = None if _DERIVATIVE.search(text) else parse_expression(text)
    return (
        MathAnswer("text", text)
        if tree is None
        else MathAnswer("scalar", text, tree=tree, unit=unit_behind(written, text))
    )


def are_words(text: str) -> bool:
    """Whether the text is only words ("no", or three letters and more): parsed as products, all anagrams are equal."""
    is_alphabetic = re.fullmatch(r"[A-Za-z][A-Za-z' -]*[A-Za-z]", text) is not None
    is_formula = {*FUNCTIONS, "pi", "over", "plus", "minus"} & set(text.split())
    return is_alphabetic and not is_formula and (len(re.findall(r"[A-Za-z]", text)) > 2 or text.lower() == "no")


def split(text: str, separator: str = ",") -> list[str]:
    """Split at separators (`,` and `;` alike) outside all brackets and matrices."""
    parts, start, depth, at = [], 0, 0, 0
    while at < len(text):
        character = text[at]
        depth += (character in "([{") - (character in ")]}")
        if character == "\\":
            depth += text.startswith(r"\begin", at) - text.startswith(r"\end", at)
        is_separator = character in ",;" if separator == "," else text.startswith(separator, at)
        if is_separator and depth == 0:
            parts.append(text[start:at].strip())
            start = at + len(separator)
        at += 1
    parts.append(text[start:].strip())
    return parts if all(parts) else [text]


def closes_at(text: str) -> int:
    """Index at which the text's opening bracket closes, or -1 if it never does. Any closing bracket matches: [1, 2)."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ")]}":
            return at
    return -1
