"""Multiple-choice answers: extracts and compares the chosen letter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any

from slimectl.errors import RecordError
from slimectl.rewards.base import Grade, Span, Verifier, no_answer
from slimectl.rewards.extraction import find_boxed, find_last_line, label_text
from slimectl.rewards.math.verifier import after_thinking
from slimectl.types import Sample

DEFAULT_LETTERS = "ABCDEFGHIJ"
MAX_SEARCHED = 20_000
"""Characters at the end of a response that are searched for the choice."""

_END = r"(?![\w'’])"
_MARK = r"[*_$\s]{0,8}"
_LEAD_IN = r"(?i:\b(?:answer|option|choice))[*_]{0,3}\s{0,8}(?:(?i:is|would be|must be|should be)\b|[:=])\s{0,8}:?"
_LETTER = rf"(?:\(\s?([A-Za-z])\s?\)|\[\s?([A-Za-z])\s?\]|([A-Z]){_END})"
_STATED = re.compile(rf"{_LEAD_IN}{_MARK}(?:(?i:option|choice){_MARK})?{_LETTER}")
_STATED_TEXT = re.compile(rf"{_LEAD_IN}{_MARK}([^\n]{{1,300}})")
_RIGHT = re.compile(
    rf"(?<![\w'’]){_LETTER}{_MARK}(?i:is|must\s+be|seems|looks)\s{{1,8}}(?i:the\s)?(?i:right|correct|true|best|answer)\b"
)
_BOLD = re.compile(rf"\*\*\s?(?:(?i:option|choice)\s)?{_LETTER}[^*\n]{{0,200}}\*\*")
_NEGATED = re.compile(r"\b(?:not|nor|than|neither|except)\s+(?:option\s+|choice\s+)?[(*]{0,3}\s?$", re.IGNORECASE)
_PARENTHESISED = re.compile(r"\(([A-Z])\)")
_IN_BOX = re.compile(rf"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{{|[\s{{($])*([A-Za-z]){_END}")
_ARTICLE = r"(?=\s+(?!(?:is|was|because|since|as|and|or|must|seems|fits)\b)[a-z])"
_STANDALONE = re.compile(rf"(?<![\w'’])(?!A{_ARTICLE}|I\s+[a-z])([A-Z]){_END}")


@dataclass(frozen=True)
class Gpqa(Verifier):
    r"""1.0 if the choice that the response states is the label's.

    >>> Gpqa()(Sample(response="<think>A or B?</think> The answer is (B).", label="B"))
    1.0

    Written for GPQA (Rein et al. 2023, arXiv:2311.12022), usable for any multiple choice. Text before </think> is
    ignored. The first of these patterns that names a valid letter decides, by its last match: "answer (option, choice)
    is X", "Final answer: X" or \boxed{X}; the same with the text of a choice, or a line of it alone at the end; "X is
    right"; **X**; (X); a standalone capital, where "A" and "I" before a lower-case word do not count. "Not X" does not.

    Valid letters are metadata.valid_letters, else as many as metadata.choices (a list of texts, or letter: text), else
    A to J. The label is metadata.correct_letter or the sample's: a letter, the text of a choice, an index from 0.
    Raises RecordError for any other.
    """

    def explain(self, sample: Sample) -> Grade:
        choices = _choices(sample)
        expected = _label(sample, choices)
        match = _find(sample.response, choices)
        if match is None:
            return no_answer("whole response", f"no choice among {''.join(choices)} is named")
        letter, place, source = match
        right = letter == expected
        reason = f"the choice {letter} {'is' if right else 'is not'} the label's, {expected}"
        return Grade(float(right), source, reason, place.text, place.span)

    def extract(self, sample: Sample) -> str | None:
        match = _find(sample.response, _choices(sample))
        return match[1].text if match else None

    def same_answer(self, sample: Sample, first: str, second: str) -> bool:
        choices = _choices(sample)
        letters = [_letter_of(text, choices) for text in (first, second)]
        return first == second or letters[0] == letters[1] is not None


def _find(response: str, choices: dict[str, str]) -> tuple[str, Span, str] | None:
    """(letter, its span in the response, name of the pattern that matched)."""
    answer = after_thinking(response, ("</think>",)) or Span(response, 0)
    start = max(answer.start, len(response) - MAX_SEARCHED)
    text = response[start:]
    places = [
        ("answer as stated", [*_letters(_STATED, text), *_boxed_letter(text)]),
        ("text of a choice", _choice_texts(text, choices)),
        ("letter said to be right", _letters(_RIGHT, text)),
        ("last bold letter", _letters(_BOLD, text)),
        ("last letter in parentheses", _letters(_PARENTHESISED, text)),
        ("last capital that stands alone", _letters(_STANDALONE, text)),
    ]
    for source, candidates in places:
        valid = [(place.start, letter, place) for letter, place in candidates if letter in choices]
        if valid:
            _, letter, place = max(valid)
            return letter, Span(place.text, start + place.start), source
    return None


def _letters(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, Span]]:
    for match in pattern.finditer(text):
        group = match.lastindex or 0
        if _NEGATED.search(text, max(0, match.start() - 24), match.start(group)):
            continue
        yield match[group].upper(), Span(match[group], match.start(group))


def _boxed_letter(text: str) -> Iterator[tuple[str, Span]]:
    boxed = find_boxed(text)
    match = _IN_BOX.match(boxed.text) if boxed else None
    if boxed and match:
        yield match[1].upper(), Span(match[1], boxed.start + match.start(1))


def _choice_texts(text: str, choices: dict[str, str]) -> list[tuple[str, Span]]:
    """Statements that end in the text of a choice, a box that contains one, and a last line that is one."""
    stated = [Span(match[1], match.start(1)) for match in _STATED_TEXT.finditer(text)]
    boxed = find_boxed(text)
    letters = {_folded(choice_text): letter for letter, choice_text in choices.items() if choice_text}
    candidates = [
        (letters.get(_folded(place.text)), place) for place in [*stated, *filter(None, (boxed, find_last_line(text)))]
    ]
    return [(letter, place) for letter, place in candidates if letter]


def _folded(text: str) -> str:
    """Normalise for comparison: no case, spaces, emphasis or final full stop."""
    return re.sub(r"[\s*_$]+", "", text).rstrip(".").casefold()


def _choices(sample: Sample) -> dict[str, str]:
    """The text of each valid letter, "" where unknown. Raises RecordError."""
    choices: Any = sample.metadata.get("choices") or {}
    if isinstance(choices, list):
        choices = dict(zip(ascii_uppercase, choices, strict=False)) if len(choices) <= len(ascii_uppercase) else None
    valid: Any = sample.metadata.get("valid_letters") or list(choices or DEFAULT_LETTERS)
    if (
        not isinstance(choices, dict)
        or not isinstance(valid, list | str)
        or not all(map(_is_letter, [*choices, *valid]))
    ):
        raise RecordError(
            f"sample {sample.index}: metadata.choices: give a list of texts or {{letter: text}}; valid_letters: letters"
        )
    return {letter.upper(): str(choices.get(letter, choices.get(letter.upper(), ""))) for letter in valid}


def _is_letter(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 1 and value.upper() in ascii_uppercase


def _label(sample: Sample, choices: dict[str, str]) -> str:
    letter = sample.metadata.get("correct_letter")
    if letter is not None and letter != sample.label:
        return _label(replace(sample, label=letter), choices)
    text, label = label_text(sample, "gpqa"), sample.label
    if isinstance(label, int | float):
        if label == int(label) and 0 <= label < len(choices):
            return list(choices)[int(label)]
        raise RecordError(f"sample {sample.index}: label: {label} is no index of {len(choices)} choices, from 0")
    if (letter := _letter_of(text, choices)) is not None:
        return letter
    raise RecordError(
        f"sample {sample.index}: label: {text[:60]!r} is neither a letter of {''.join(choices)} nor a choice"
    )


def _letter_of(text: str, choices: dict[str, str]) -> str | None:
    """The letter that is written, or whose choice is; None for any other text."""
    letter = text.strip("()[]. ").upper()
    if letter in choices:
        return letter
    return next((key for key, choice in choices.items() if choice and _folded(choice) == _folded(text)), None)
