"""Multiple-choice answers: extracts and compares the chosen letter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any

from slimectl.errors import RecordError
from slimectl.rewards import letters
from slimectl.rewards.base import Grade, Span, Verifier, no_answer
from slimectl.rewards.extraction import UNCLOSED, bare, composed, find_boxed, find_last_line, label_text
from slimectl.rewards.thoughts import answer_span
from slimectl.types import Sample

DEFAULT_LETTERS = "ABCDEFGHIJ"
MAX_SEARCHED = 20_000
"""Characters at the end of a response that are searched for the choice."""


@dataclass(frozen=True)
class Gpqa(Verifier):
    r"""1.0 if the response states the label's choice.

    >>> Gpqa()(Sample(response="<think>A or B?</think> The answer is (B).", label="B"))
    1.0

    Written for GPQA (Rein et al. 2023, arXiv:2311.12022), usable for any multiple choice, in several languages. Only
    the text after the last closed thought is read. The last match of the first pattern with a valid letter decides:
    1. "answer (option, choice) is X", "Final answer: X" or \boxed{X}, or the same with the text of a choice
    2. a last line with the text of a choice
    3. "X is right"
    4. **X**
    5. a line that starts with "X." or is "(X)"
    6. (X) anywhere
    7. a standalone capital, except "A" and "I" before a lower-case word

    The letters of a list of choices, "not X", "X is wrong" and letters of a formula (E = mc^2) do not count. Several
    letters in the deciding match ("A and C") count as no answer.

    Valid letters are metadata.valid_letters, else one for each of metadata.choices (a list of texts, or letter: text),
    else A to J. The label is metadata.correct_letter or the sample's: a letter, the text of a choice, or an index from
    0. Raises RecordError for other labels.
    """

    def explain(self, sample: Sample) -> Grade:
        choices = _choices(sample)
        expected = _label(sample, choices)
        answer = answer_span(sample)
        if answer is None:
            return no_answer("response", UNCLOSED)
        match = _find(answer, choices)
        if match is None:
            return no_answer("response", f"states none of the choices {''.join(choices)}, or several")
        letter, place, source = match
        right = letter == expected
        reason = f"the choice {letter} {'is' if right else 'is not'} the label's, {expected}"
        return Grade(float(right), source, reason, place.text, place.span)

    def extract(self, sample: Sample) -> str | None:
        answer = answer_span(sample)
        match = _find(answer, _choices(sample)) if answer else None
        return match[1].text if match else None

    def same_answer(self, sample: Sample, first: str, second: str) -> bool:
        choices = _choices(sample)
        named = [_letter_of(text, choices) for text in (first, second)]
        return first == second or named[0] == named[1] is not None


def _find(answer: Span, choices: dict[str, str]) -> tuple[str, Span, str] | None:
    """Return (letter, its span in the response, name of the pattern that matched)."""
    cut = max(0, len(answer.text) - MAX_SEARCHED)
    original = answer.text[cut:]
    text = letters.plain(original)
    patterns: list[tuple[str, Callable[[str], Iterable[tuple[str, Span]]]]] = [
        ("answer as stated", lambda text: [*letters.stated(text), *_stated_choices(original, choices)]),
        ("text of a choice", lambda _: _choices_of([find_last_line(original)], choices)),
        ("letter that is called right", letters.said_to_be_right),
        ("last bold letter", letters.bold),
        ("letter at the start of a line", letters.begins_line),
        ("last letter in parentheses", letters.parenthesised),
        ("last standalone capital", letters.standalone),
    ]
    for source, candidates in patterns:
        valid = [
            (place.start, len(place.text), letter, place)
            for letter, place in candidates(text)
            if not letter or letter in choices
        ]
        if valid:
            *_, letter, (text, start) = max(valid)
            place = Span(original[start : start + len(text)], answer.start + cut + start)
            return (letter, place, source) if letter else None
    return None


def _stated_choices(text: str, choices: dict[str, str]) -> list[tuple[str, Span]]:
    """Statements and boxes with the text of a choice."""
    if not any(choices.values()):
        return []
    return _choices_of([*letters.stated_texts(text), find_boxed(text)], choices)


def _choices_of(places: list[Span | None], choices: dict[str, str]) -> list[tuple[str, Span]]:
    """Return the places with the text of a choice, with its letter. A text of one character counts as a letter."""
    by_text = {_folded(choice): letter for letter, choice in choices.items()}
    pairs = [(by_text.get(_folded(place.text)), place) for place in places if place]
    return [(letter, place) for letter, place in pairs if letter and len(place.text.strip()) > 1]


def _folded(text: str) -> str:
    """Normalise for comparison: compose accents, and remove case, spaces, emphasis, quotation marks and full stop."""
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}|\\(?:[,;:! ]|q?quad\b)", r"\1", composed(text))
    return bare(re.sub(r"[\s*_$]+", "", text)).casefold()


def _choices(sample: Sample) -> dict[str, str]:
    """Return the text of each valid letter, "" if unknown. Raises RecordError."""
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
            f"sample {sample.index}: metadata.choices: give a list of texts or {{letter: text}}, and valid_letters as "
            f"letters"
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
        raise RecordError(f"sample {sample.index}: label: {label} is not an index of {len(choices)} choices, from 0")
    if (letter := _letter_of(text, choices)) is not None:
        return letter
    raise RecordError(
        f"sample {sample.index}: label: {text[:60]!r} is neither a letter of {''.join(choices)} nor a choice"
    )


def _letter_of(text: str, choices: dict[str, str]) -> str | None:
    """Return the letter that the text is, or the letter of the choice that it is, or None."""
    letter = letters.plain(text).strip("()[]. ").upper()
    if letter in choices:
        return letter
    return next((key for key, choice in choices.items() if choice and _folded(choice) == _folded(text)), None)
