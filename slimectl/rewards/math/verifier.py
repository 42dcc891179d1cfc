"""Mathematical equivalence of the answer in the last \boxed{} and the label."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from slimectl.rewards.base import Grade, Span, Verifier, binary_grade, no_answer, quote
from slimectl.rewards.extraction import SOURCE_WORDS, find_boxed, label_text, last_boxed, missing
from slimectl.rewards.math.latex import Answer, normalized, parse_structure, right_hand_side, split_assignment
from slimectl.rewards.math.numbers import exact_number
from slimectl.rewards.math.symbolic import same_equation, symbolically_equal
from slimectl.types import Sample

MAX_ANSWER = 2000
"""Length in characters above which an answer is compared as text only."""

_RELATION = re.compile(r"[<>]|\\[lg]e(?![A-Za-z])|\\[lg]t(?![A-Za-z])")


@dataclass(frozen=True)
class Math(Verifier):
    r"""1.0 if the content of the last \boxed{} or \fbox{} equals the label; 0.0 if not, or without a closed box.

    >>> Math()(Sample(response=r"Half of it: \boxed{\frac{2}{4}}", label="0.5"))
    1.0

    Equality is exact (1/3 is not 0.333333, \pi is not 3.14159), by `equal`. A label that is itself boxed is unpacked.
    """

    BOXED_OPTIONS: ClassVar[dict[str, Any] | None] = {}

    @property
    def slow(self) -> bool:
        return True

    def explain(self, sample: Sample) -> Grade:
        label, answer = label_text(sample, "math"), find_boxed(sample.response)
        if answer is None:
            return no_answer(SOURCE_WORDS["boxed"], missing("boxed"))
        boxed = last_boxed(label)
        label = label if boxed is None else boxed
        right = equal(label, answer.text)
        note = "" if right or len(answer.text) > MAX_ANSWER else f" (read as {quote(normalized(answer.text))})"
        return binary_grade(right, SOURCE_WORDS["boxed"], answer, label, ("equals", "does not equal"), note)

    def extract(self, sample: Sample) -> str | None:
        return last_boxed(sample.response)


def equal(label: str, answer: str) -> bool:
    r"""Whether two answers are the same after normalisation (see latex.normalized), piece by piece or symbolically.

    Lists, sets and unions are unordered (a list is a set); tuples and intervals are ordered and keep their brackets, so
    (1,2) is neither [1,2] nor 1,2. Words compare as words, ignoring case: no is not on. Units are dropped, not
    converted.
    """
    if not label or not answer:
        return False
    if label == answer:
        return True
    if len(label) > MAX_ANSWER or len(answer) > MAX_ANSWER:
        return False
    label, answer = normalized(label), normalized(answer)
    if _without_spaces(label) == _without_spaces(answer) != "" or same_equation(label, answer):
        return True
    return _equal_structures(parse_structure(right_hand_side(label)), parse_structure(right_hand_side(answer)))


def _equal_structures(label: Answer, answer: Answer) -> bool:
    if label.kind == answer.kind == "leaf":
        return _equal_leaves(label.text, answer.text)
    if label.kind != answer.kind or label.brackets != answer.brackets:
        # 1 < x < 2 may be written (1, 2): math-verify knows relations as sets.
        related = bool(_RELATION.search(label.text)) != bool(_RELATION.search(answer.text))
        return related and symbolically_equal(label.text, answer.text)
    if len(label.items) != len(answer.items):
        return False
    if label.kind == "ordered":
        return all(map(_equal_structures, label.items, answer.items))
    unmatched = list(answer.items)
    for item in label.items:
        match = next((candidate for candidate in unmatched if _equal_structures(item, candidate)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _equal_leaves(label: str, answer: str) -> bool:
    if _without_spaces(label) == _without_spaces(answer) != "":
        return True
    pairs = split_assignment(label), split_assignment(answer)
    if pairs[0] and pairs[1] and pairs[0][0] != pairs[1][0]:
        return False
    label, answer = (pair[1] if pair else text for pair, text in zip(pairs, (label, answer), strict=True))
    numbers = exact_number(label), exact_number(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if _are_words(label) or _are_words(answer):
        return _without_spaces(label).casefold() == _without_spaces(answer).casefold() != ""
    if "=" in label or "=" in answer:
        return same_equation(label, answer)
    return symbolically_equal(label, answer)


def _are_words(text: str) -> bool:
    """Whether the text is only words ("no", or three letters and more): parsed as products, all anagrams are equal."""
    is_alphabetic = re.fullmatch(r"[A-Za-z][A-Za-z' -]*[A-Za-z]", text) is not None
    return is_alphabetic and (len(re.findall(r"[A-Za-z]", text)) > 2 or text.lower() == "no")


def _without_spaces(text: str) -> str:
    return re.sub(r"\s+", "", text)


MARKERS = ("</think>", "###Response")


@dataclass(frozen=True)
class Deepscaler(Verifier):
    r"""`math` on the text after the last </think>, or where there is none after the last ###Response; else 0.0.

    >>> Deepscaler()(Sample(response=r"<think>\boxed{1}?</think> It is \boxed{2}.", label="2"))
    1.0

    Luo et al. 2025, "DeepScaleR: Surpassing O1-Preview with a 1.5B Model by Scaling RL", and its published reward: a
    response with neither marker has not finished thinking and earns nothing, whatever it has boxed.
    """

    BOXED_OPTIONS: ClassVar[dict[str, Any] | None] = {}

    @property
    def slow(self) -> bool:
        return True

    def explain(self, sample: Sample) -> Grade:
        label_text(sample, "deepscaler")
        answer = after_thinking(sample.response)
        if answer is None:
            return no_answer("text after the thinking", f"neither {MARKERS[0]} nor {MARKERS[1]} in the response")
        inner = Math().explain(replace(sample, response=answer.text))
        return inner.moved(answer.start, "text after the thinking")

    def extract(self, sample: Sample) -> str | None:
        answer = after_thinking(sample.response)
        return None if answer is None else Math().extract(replace(sample, response=answer.text))


def after_thinking(text: str, markers: tuple[str, ...] = MARKERS) -> Span | None:
    """The text after the last occurrence of the first marker that occurs in it; None if no marker occurs."""
    for marker in markers:
        at = text.rfind(marker)
        if at >= 0:
            return Span(text[at + len(marker) :], at + len(marker))
    return None
