"""Mathematical equivalence of the answer in the last \boxed{} and the label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from slimectl.rewards.base import Grade, Span, Verifier, binary_grade, no_answer, quote
from slimectl.rewards.extraction import (
    SOURCE_NAMES,
    UNCLOSED,
    any_label,
    find,
    label_text,
    last_boxed,
    missing,
    text_of,
    with_response,
)
from slimectl.rewards.math.compare import same_answer
from slimectl.rewards.math.latex import normalized
from slimectl.rewards.thoughts import answer_span
from slimectl.types import Sample

MAX_ANSWER = 2000
"""Length in characters above which an answer is compared as text only."""


@dataclass(frozen=True)
class Math(Verifier):
    r"""1.0 if the content of the last \boxed{} or \fbox{} equals the label, else 0.0.

    >>> Math()(Sample(response=r"Half of it: \boxed{\frac{2}{4}}", label="0.5"))
    1.0

    Equality is exact (1/3 is not 0.333333, \pi is not 3.14159), by `equal`. A label that is itself boxed is unpacked.
    """

    slow = True

    BOXED_OPTIONS: ClassVar[dict[str, Any] | None] = {}

    def prepare(self) -> None:
        same_answer(r"\sqrt{2}", r"\frac{2}{\sqrt{2}}")  # imports mpmath

    @any_label
    def explain(self, sample: Sample) -> Grade:
        label, answer = label_text(sample, "math"), find(sample, "boxed")
        if answer is None:
            return no_answer(SOURCE_NAMES["boxed"], missing(sample, "boxed"))
        boxed = last_boxed(label)
        label = label if boxed is None else boxed
        right = equal(label, answer.text)
        note = "" if right or len(answer.text) > MAX_ANSWER else f" (read as {quote(normalized(answer.text))})"
        return binary_grade(right, SOURCE_NAMES["boxed"], answer, label, ("equals", "does not equal"), note)

    def extract(self, sample: Sample) -> str | None:
        return text_of(find(sample, "boxed"))

    def same_answer(self, sample: Sample, first: str, second: str) -> bool:
        return equal(first, second)


def equal(label: str, answer: str) -> bool:
    r"""Whether two answers are the same in value, by `same_answer`, or over 2000 characters in spelling.

    Lists, sets and unions are unordered (a list is a set). Tuples and intervals are ordered and keep their brackets, so
    (1,2) is neither [1,2] nor 1,2. Words are compared as words, ignoring case, so "no" is not "on". Units are not
    converted. A unit on only one side is dropped, and two units must measure the same.
    """
    if not label or not answer:
        return False
    if label == answer:
        return True
    if len(label) > MAX_ANSWER or len(answer) > MAX_ANSWER:
        return False
    return same_answer(label, answer)


RESPONSE = "###Response"


@dataclass(frozen=True)
class Deepscaler(Verifier):
    r"""`math` on the text after the last closed thought, or else after the last ###Response. 0.0 without either.

    >>> Deepscaler()(Sample(response=r"<think>\boxed{1}?</think> It is \boxed{2}.", label="2"))
    1.0

    Luo et al. 2025, "DeepScaleR: Surpassing O1-Preview with a 1.5B Model by Scaling RL", and its published reward. A
    response with neither has not finished thinking, so its boxes do not count. The published reward knows only
    </think>, and keeps reading if a new thought was opened. Here thoughts end as for every verifier.
    """

    slow = True

    BOXED_OPTIONS: ClassVar[dict[str, Any] | None] = {}

    def prepare(self) -> None:
        Math().prepare()

    @any_label
    def explain(self, sample: Sample) -> Grade:
        label_text(sample, "deepscaler")
        answer = _finished(sample)
        if isinstance(answer, str):
            return no_answer("text after the thinking", answer)
        return Math().explain(with_response(sample, answer.text)).moved(answer.start, "text after the thinking")

    def extract(self, sample: Sample) -> str | None:
        answer = _finished(sample)
        return None if isinstance(answer, str) else Math().extract(with_response(sample, answer.text))

    def same_answer(self, sample: Sample, first: str, second: str) -> bool:
        return Math().same_answer(sample, first, second)


def _finished(sample: Sample) -> Span | str:
    """The text after the thoughts, or the reason why there is none."""
    answer = answer_span(sample)
    if answer is None:
        return UNCLOSED
    if answer.start:
        return answer
    _, marker, rest = answer.text.rpartition(RESPONSE)
    if not marker:
        return f"neither a closed thought nor {RESPONSE} in the response"
    return Span(rest, len(answer.text) - len(rest))
