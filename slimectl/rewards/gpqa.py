"""Multiple choice: which letter was chosen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from slimectl.errors import RecordError
from slimectl.rewards.deepscaler import after_thinking
from slimectl.rewards.extraction import find_boxed, label_text
from slimectl.rewards.verdict import Found, Verdict, Verifier, nothing
from slimectl.types import Sample

DEFAULT_LETTERS = "ABCDEFGHIJ"
MAX_SEARCHED = 20_000
"""Characters from the end of a response in which the choice is looked for."""

_END = r"(?![\w'’])"
_MARK = r"[*_$\s]{0,8}"
_SAID = r"(?i:\b(?:answer|option|choice))[*_]{0,3}\s{0,8}(?:(?i:is|would be|must be|should be)\b|[:=])\s{0,8}:?"
_LETTER = rf"(?:\(\s?([A-Za-z])\s?\)|\[\s?([A-Za-z])\s?\]|([A-Z]){_END})"
_STATED = re.compile(rf"{_SAID}{_MARK}(?:(?i:option|choice){_MARK})?{_LETTER}")
_STATED_TEXT = re.compile(rf"{_SAID}{_MARK}([^\n]{{1,300}})")
_BOLD = re.compile(rf"\*\*\s?(?:(?i:option|choice)\s)?{_LETTER}[^*\n]{{0,200}}\*\*")
_PARENTHESISED = re.compile(r"\(([A-Z])\)")
_IN_BOX = re.compile(rf"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{{|[\s{{($])*([A-Za-z]){_END}")
_ARTICLE = r"(?=\s+(?!(?:is|was|because|since|as|and|or|must|seems|fits)\b)[a-z])"
_STANDALONE = re.compile(rf"(?<![\w'’])(?!A{_ARTICLE}|I\s+[a-z])([A-Z]){_END}")


@dataclass(frozen=True)
class Gpqa(Verifier):
    r"""1.0 if the choice that the response states is the label's.

    >>> Gpqa()(Sample(response="<think>A or B?</think> The answer is (B).", label="B"))
    1.0

    Made for GPQA (Rein et al. 2023, arXiv:2311.12022), fit for any multiple choice. What stands before </think> is not
    read. The first of these that names a valid letter decides, and of several places the last: "answer (option,
    choice) is X", "Final answer: X" or \boxed{X}; the same with the text of a choice; **X**; (X); a capital that stands
    alone, where "A" and "I" before a small word are no choice.

    Valid letters are metadata.valid_letters, else as many as metadata.choices (a list of texts, or letter: text), else
    A to J. A label is a letter, the text of a choice, or an index from 0. Raises RecordError for any other.
    """

    def explain(self, sample: Sample) -> Verdict:
        choices = _choices(sample)
        wanted = _label(sample, choices)
        found = _find(sample.response, choices)
        if found is None:
            return nothing("whole response", f"no choice among {''.join(choices)} is named")
        letter, place, where = found
        right = letter == wanted
        why = f"the choice {letter} {'is' if right else 'is not'} the label's, {wanted}"
        return Verdict(float(right), where, why, place.text, place.span)

    def extract(self, sample: Sample) -> str | None:
        found = _find(sample.response, _choices(sample))
        return found[1].text if found else None


def _find(response: str, choices: dict[str, str]) -> tuple[str, Found, str] | None:
    """(letter, where it stands, what kind of place that is)."""
    answer = after_thinking(response, ("</think>",)) or Found(response, 0)
    start = max(answer.start, len(response) - MAX_SEARCHED)
    text = response[start:]
    places = [
        ("answer as stated", [*_letters(_STATED, text), *_boxed_letter(text)]),
        ("text of a choice", _choice_texts(text, choices)),
        ("last bold letter", _letters(_BOLD, text)),
        ("last letter in parentheses", _letters(_PARENTHESISED, text)),
        ("last capital that stands alone", _letters(_STANDALONE, text)),
    ]
    for where, found in places:
        valid = [(place.start, letter, place) for letter, place in found if letter in choices]
        if valid:
            _, letter, place = max(valid)
            return letter, Found(place.text, start + place.start), where
    return None


def _letters(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, Found]]:
    for match in pattern.finditer(text):
        group = match.lastindex or 0
        yield match[group].upper(), Found(match[group], match.start(group))


def _boxed_letter(text: str) -> Iterator[tuple[str, Found]]:
    boxed = find_boxed(text)
    match = _IN_BOX.match(boxed.text) if boxed else None
    if boxed and match:
        yield match[1].upper(), Found(match[1], boxed.start + match.start(1))


def _choice_texts(text: str, choices: dict[str, str]) -> list[tuple[str, Found]]:
    """Statements that end in the text of a choice, and a box that holds one."""
    stated = [Found(match[1], match.start(1)) for match in _STATED_TEXT.finditer(text)]
    boxed = find_boxed(text)
    letters = {_folded(words): letter for letter, words in choices.items() if words}
    found = [(letters.get(_folded(place.text)), place) for place in [*stated, *([boxed] if boxed else [])]]
    return [(letter, place) for letter, place in found if letter]


def _folded(text: str) -> str:
    """A text without case, spaces, emphasis and the full stop at its end."""
    return re.sub(r"[\s*_$]+", "", text).rstrip(".").casefold()


def _choices(sample: Sample) -> dict[str, str]:
    """The text of each valid letter, "" where it is not known. Raises RecordError."""
    given: Any = sample.metadata.get("choices") or {}
    if isinstance(given, list):
        given = dict(zip(ascii_uppercase, given, strict=False)) if len(given) <= len(ascii_uppercase) else None
    valid: Any = sample.metadata.get("valid_letters") or list(given or DEFAULT_LETTERS)
    if not isinstance(given, dict) or not isinstance(valid, list | str) or not all(map(_is_letter, [*given, *valid])):
        raise RecordError(
            f"sample {sample.index}: metadata.choices: give a list of texts or {{letter: text}}; valid_letters: letters"
        )
    return {letter.upper(): str(given.get(letter, given.get(letter.upper(), ""))) for letter in valid}


def _is_letter(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 1 and value.upper() in ascii_uppercase


def _label(sample: Sample, choices: dict[str, str]) -> str:
    text, label = label_text(sample, "gpqa"), sample.label
    if isinstance(label, int | float):
        if label == int(label) and 0 <= label < len(choices):
            return list(choices)[int(label)]
        raise RecordError(f"sample {sample.index}: label: {label} is no index of {len(choices)} choices, from 0")
    letter = text.strip("()[]. ").upper()
    if letter in choices:
        return letter
    for letter, words in choices.items():
        if words and _folded(words) == _folded(text):
            return letter
    raise RecordError(
        f"sample {sample.index}: label: {text[:60]!r} is neither a letter of {''.join(choices)} nor a choice"
    )
