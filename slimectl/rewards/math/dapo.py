"""DAPO's rule-based reward on the last `Answer:` line."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from slimectl.rewards.base import Grade, Span, Verifier, no_answer, quote
from slimectl.rewards.extraction import (
    SOURCE_NAMES,
    UNCLOSED,
    any_label,
    bare,
    composed,
    find_boxed,
    label_text,
    last_boxed,
    missing,
    text_of,
    trimmed,
)
from slimectl.rewards.math.latex import normalized
from slimectl.rewards.math.leaves import split
from slimectl.rewards.math.numbers import exact_number
from slimectl.rewards.thoughts import answer_span
from slimectl.types import Sample

TAIL = 300
"""Characters at the end of a response that are searched, which also limits the cost."""

MAX_LABEL = 2000

_EMPHASIS = " \t\r\n*_`~#"
_ANSWER = re.compile(r"answer[\s*_`~]*[:：]\s*(?=[^\n]*[^\s*_`~#][^\n]*)", re.IGNORECASE)
_FORMULA = re.compile(r"(?<!\\)\$((?:[^$\\]|\\.)+)\$|\\\((.+?)\\\)")
_OTHERWISE = re.compile(r"\$|\\\(|[<>≤≥≠]|\b(?:or|and|not|wrong)\b|n't", re.IGNORECASE)
"""Text next to a formula that shows it is not the answer, or not the only one."""

_EQUALS = re.compile(r"(?<![!<>≤≥≠=])=")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d|[A-Za-z]|\{[^{}]*\})\s*(\d|[A-Za-z]|\{[^{}]*\})")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([\dA-Za-z])")
_SPECIAL_TOKENS = re.compile(r"(?:\s*(?:<[|｜][^<>|｜\n]{1,40}[|｜]>|</s>|<eos>|<end_of_turn>))+\s*$")
"""Tokens that end a turn, if a decoder has left them in the text."""

_QUOTIENT = re.compile(r"([-+]?)(?:(\d+) )?(\\?[A-Za-z]+|\d+)/(\\?[A-Za-z]+|\d+)")
_DOTS = re.compile(r"\\l?dots(?![A-Za-z])")
_ARTICLE = re.compile(r"^(?:an?|the)\s+(?=[A-Za-z]{2})", re.IGNORECASE)


@dataclass(frozen=True)
class Dapo(Verifier):
    r"""{score: 1.0 or -1.0, acc: 1.0 or 0.0, pred: the answer} for the last `Answer:` line.

    >>> Dapo()(Sample(response="so\n**Answer:** $x = 5.0$", label="5"))
    {'score': 1.0, 'acc': 1.0, 'pred': '5.0'}

    The rule-based reward of Yu et al. 2025, arXiv:2503.14476, sec. 3.1. The normalisation follows Lewkowycz et al.
    2022, arXiv:2206.14858, app. D.1, in spirit. Units, LaTeX's spaces and sizes, \text, $, thousands separators,
    \ldots and special tokens at the end are ignored. In an equation only the right side counts (43 = 42 is 42).
    Quotation marks around an answer, full stops of other scripts and the encoding of accents do not count.

    Numbers are compared as numbers, and anything else as case-sensitive text. Number words are not read, so 2 million
    is not 2000000, and 42... is not 42. Only the last 300 characters are read, after the last closed thought,
    although the published rule has no thoughts. `source="boxed"` (`boxed_dapo`) reads the last \boxed{} there instead
    of the line. Without an answer `pred` is "".
    """

    bounds = (-1.0, 1.0)

    BOXED_OPTIONS: ClassVar[dict[str, Any] | None] = {"source": "boxed"}

    source: Literal["answer_line", "boxed"] = "answer_line"

    @any_label
    def explain(self, sample: Sample) -> Grade:
        label, answer = label_text(sample, "dapo"), self._find(sample)
        location = "last Answer: line" if self.source == "answer_line" else SOURCE_NAMES["boxed"]
        source = f"{location} of the last {TAIL} characters"
        if answer is None:
            reason = missing(sample, "boxed")
            if self.source == "answer_line" and reason != UNCLOSED:
                reason = "no line with Answer: and something after it"
            return no_answer(source, reason, _reward(False, ""))
        expected, actual = canonical(label[:MAX_LABEL]), canonical(answer.text)
        right = _equal(expected, actual)
        reason = f"{quote(actual)} {'equals' if right else 'does not equal'} the label {quote(expected)}"
        return Grade(_reward(right, actual), source, reason, answer.text, answer.span)

    def extract(self, sample: Sample) -> str | None:
        return text_of(self._find(sample))

    def same_answer(self, sample: Sample, first: str, second: str) -> bool:
        return _equal(canonical(first[:MAX_LABEL]), canonical(second[:MAX_LABEL]))

    def _find(self, sample: Sample) -> Span | None:
        answer = answer_span(sample)
        if answer is None:
            return None
        response = answer.text
        special = _SPECIAL_TOKENS.search(response, max(0, len(response) - TAIL))
        response = response[: special.start()] if special else response
        before = max(0, len(response) - TAIL)
        tail = response[before:]
        if self.source == "boxed":
            match = find_boxed(tail)
        else:
            headers = deque(_ANSWER.finditer(tail), maxlen=1)
            match = _line(tail, headers[0].end()) if headers else None
        return Span(match.text, answer.start + before + match.start) if match else None


def canonical(text: str) -> str:
    r"""Normalise an answer for comparison.

    >>> [canonical(text) for text in (r"The area is $\dfrac12$ cm.", "x = 1,200 dollars", r"\text{an apple}")]
    ['\\frac{1}{2}', '1200', 'apple']
    """
    boxed = last_boxed(text)
    text = bare(composed(text if boxed is None else boxed).strip(_EMPHASIS))
    if (formula := _FORMULA.search(text)) and not _has_more(text, *formula.span()):
        text = formula[1] or formula[2]
    *sides, value = _EQUALS.split(_DOTS.sub("", text))
    is_chain = not any(len(split(re.sub(r"\b(?:or|and)\b", ",", side))) > 1 for side in sides)
    text = normalized(value if is_chain else text)
    text = _SHORT_FRACTION.sub(
        lambda match: rf"\frac{{{_without_braces(match[1])}}}{{{_without_braces(match[2])}}}", text
    )
    text = _ARTICLE.sub("", _SHORT_ROOT.sub(r"\\sqrt{\1}", text))
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # 1 1/2 is not 11/2


def _has_more(text: str, start: int, end: int) -> bool:
    """Whether the text next to the formula has more than words for it and a unit."""
    return _OTHERWISE.search(text[:start] + " " + text[end:]) is not None or re.search(r"\d", text[end:]) is not None


def _without_braces(argument: str) -> str:
    return argument.removeprefix("{").removesuffix("}")


def _line(text: str, start: int) -> Span:
    """The rest of the line, without the emphasis around it."""
    end = text.find("\n", start)
    line = text[start : len(text) if end < 0 else end]
    stripped = line.strip(_EMPHASIS)
    return trimmed(text, start + line.index(stripped), start + line.index(stripped) + len(stripped))


def _equal(expected: str, actual: str) -> bool:
    numbers = exact_number(expected), exact_number(actual)
    if None not in numbers:
        return actual != "" and numbers[0] == numbers[1]
    return actual != "" and _with_fraction(expected) == _with_fraction(actual)


def _with_fraction(text: str) -> str:
    r"""The text, 3/4 as \frac{3}{4} and 1 1/2 as 1\frac{1}{2}."""
    match = _QUOTIENT.fullmatch(text)
    return rf"{match[1]}{match[2] or ''}\frac{{{match[3]}}}{{{match[4]}}}" if match else text


def _reward(right: bool, answer: str) -> dict[str, Any]:
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer}
