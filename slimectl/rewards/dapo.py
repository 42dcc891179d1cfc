"""DAPO's rule: the last `Answer:` line, right or wrong."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from slimectl.rewards.extraction import SOURCE_WORDS, find_boxed, label_text, last_boxed, missing, text_of, trimmed
from slimectl.rewards.latex import normalized
from slimectl.rewards.numerals import exact_number
from slimectl.rewards.verdict import Found, Verdict, Verifier, nothing, shown
from slimectl.types import Sample

TAIL = 300
"""Characters at the end of a response that are looked at; they also bound the cost."""

MAX_LABEL = 2000

_EMPHASIS = " \t\r\n*_`~#"
_ANSWER = re.compile(r"answer[\s*_`~]*[:：]\s*(?=[^\n]*[^\s*_`~#][^\n]*)", re.IGNORECASE)
_FORMULA = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d|[A-Za-z]|\{[^{}]*\})\s*(\d|[A-Za-z]|\{[^{}]*\})")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([\dA-Za-z])")
_ARTICLE = re.compile(r"^(?:an?|the)\s+(?=[A-Za-z]{2})", re.IGNORECASE)


@dataclass(frozen=True)
class Dapo(Verifier):
    r"""{score: 1.0 or -1.0, acc: 1.0 or 0.0, pred: what was answered} for the last `Answer:` line.

    >>> Dapo()(Sample(response="so\n**Answer:** $x = 5.0$", label="5"))
    {'score': 1.0, 'acc': 1.0, 'pred': '5.0'}

    Yu et al. 2025, arXiv:2503.14476, sec. 3.1 (rule-based reward, 1 or -1), with the normalisation of Lewkowycz et al.
    2022, arXiv:2206.14858, app. D.1, in its sense: units, LaTeX's spaces and sizes, \text, $ and thousands separators
    do not count, of an equation only the right side. Numbers are compared as numbers, anything else as text with its
    case. Only the last 300 characters are read. `source="boxed"`, which is what `boxed_dapo` means, reads the last
    \boxed{} there instead of the line. Without an answer `pred` is "".
    """

    source: Literal["answer_line", "boxed"] = "answer_line"

    @property
    def bounds(self) -> tuple[float, float]:
        return -1.0, 1.0

    def explain(self, sample: Sample) -> Verdict:
        label, answer = label_text(sample, "dapo"), self._find(sample.response)
        where = "last Answer: line" if self.source == "answer_line" else SOURCE_WORDS["boxed"]
        source = f"{where} of the last {TAIL} characters"
        if answer is None:
            why = "no line with Answer: and something after it" if self.source == "answer_line" else missing("boxed")
            return nothing(source, why, _reward(False, ""))
        wanted, given = canonical(label[:MAX_LABEL]), canonical(answer.text)
        right = _same(wanted, given)
        why = f"{shown(given)} {'equals' if right else 'does not equal'} the label {shown(wanted)}"
        return Verdict(_reward(right, given), source, why, answer.text, answer.span)

    def extract(self, sample: Sample) -> str | None:
        return text_of(self._find(sample.response))

    def _find(self, response: str) -> Found | None:
        before = max(0, len(response) - TAIL)
        tail = response[before:]
        if self.source == "boxed":
            found = find_boxed(tail)
        else:
            headers = deque(_ANSWER.finditer(tail), maxlen=1)
            found = _line(tail, headers[0].end()) if headers else None
        return Found(found.text, before + found.start) if found else None


def canonical(text: str) -> str:
    r"""An answer as it is compared.

    >>> [canonical(text) for text in (r"The area is $\dfrac12$ cm.", "x = 1,200 dollars", r"\text{an apple}")]
    ['\\frac{1}{2}', '1200', 'apple']
    """
    boxed = last_boxed(text)
    text = (text if boxed is None else boxed).strip(_EMPHASIS)
    if formula := _FORMULA.search(text):
        text = formula[1] or formula[2]
    text = normalized(text.rpartition("=")[2])
    text = _SHORT_FRACTION.sub(lambda found: rf"\frac{{{_bare(found[1])}}}{{{_bare(found[2])}}}", text)
    text = _ARTICLE.sub("", _SHORT_ROOT.sub(r"\\sqrt{\1}", text))
    return re.sub(r"\s+", "", text)


def _bare(argument: str) -> str:
    return argument.removeprefix("{").removesuffix("}")


def _line(text: str, start: int) -> Found:
    """The rest of the line, without the emphasis around it."""
    end = text.find("\n", start)
    line = text[start : len(text) if end < 0 else end]
    kept = line.strip(_EMPHASIS)
    return trimmed(text, start + line.index(kept), start + line.index(kept) + len(kept))


def _same(wanted: str, given: str) -> bool:
    numbers = exact_number(wanted), exact_number(given)
    return given != "" and (numbers[0] == numbers[1] if None not in numbers else wanted == given)


def _reward(right: bool, answer: str) -> dict[str, Any]:
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer}
