r"""Mathematical equivalence of the answer in the last \boxed{} and the label."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slimectl.rewards.extraction import SOURCE_WORDS, find_boxed, label_text, last_boxed, missing
from slimectl.rewards.latex import Answer, assigned, normalized, taken_apart, value_of_equation
from slimectl.rewards.numerals import exact_number
from slimectl.rewards.symbolic import same_equation, symbolically_equal
from slimectl.rewards.verdict import Verdict, Verifier, graded, nothing, shown
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

    def explain(self, sample: Sample) -> Verdict:
        label, answer = label_text(sample, "math"), find_boxed(sample.response)
        if answer is None:
            return nothing(SOURCE_WORDS["boxed"], missing("boxed"))
        boxed = last_boxed(label)
        label = label if boxed is None else boxed
        right = equal(label, answer.text)
        note = "" if right or len(answer.text) > MAX_ANSWER else f" (read as {shown(normalized(answer.text))})"
        return graded(right, SOURCE_WORDS["boxed"], answer, label, ("equals", "does not equal"), note)

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
    return _equal_structures(taken_apart(value_of_equation(label)), taken_apart(value_of_equation(answer)))


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
    pairs = assigned(label), assigned(answer)
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
