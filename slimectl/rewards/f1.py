"""Word-level F1 between answer and label, as in SQuAD."""

from __future__ import annotations

import re
import string
from collections import Counter
from dataclasses import dataclass

from slimectl.rewards.extraction import SOURCE_WORDS, Source, find, label_text, missing, text_of
from slimectl.rewards.verdict import Verdict, Verifier, nothing, shown
from slimectl.types import Sample

CLOSED = ("yes", "no", "noanswer")
"""Answers that must match exactly and get no partial credit."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class F1(Verifier):
    """Harmonic mean of precision and recall over the words that answer and label have in common, 0 to 1.

    >>> F1()(Sample(response="The Eiffel Tower, Paris", label="the eiffel tower"))
    0.8

    Rajpurkar et al. 2016, arXiv:1606.05250, sec. 6.1: in lower case, without punctuation and articles. If either side
    is yes, no or noanswer, the other must be the same (Yang et al. 2018, arXiv:1809.09600). Two empty sides are equal.
    """

    source: Source = "response"

    def explain(self, sample: Sample) -> Verdict:
        label, answer = label_text(sample, "f1"), find(sample, self.source)
        if answer is None:
            return nothing(SOURCE_WORDS[self.source], missing(self.source))
        label_words, answer_words = words(label), words(answer.text)
        common = (Counter(label_words) & Counter(answer_words)).total()
        score = 2 * common / (len(label_words) + len(answer_words)) if common else float(label_words == answer_words)
        reason = f"{common} words in common: {len(answer_words)} given, {len(label_words)} in the label {shown(label)}"
        if label_words != answer_words and (" ".join(label_words) in CLOSED or " ".join(answer_words) in CLOSED):
            score, reason = 0.0, f"is not the label {shown(label)}, and yes, no and noanswer must match exactly"
        return Verdict(score, SOURCE_WORDS[self.source], reason, answer.text, answer.span)

    def extract(self, sample: Sample) -> str | None:
        return text_of(find(sample, self.source))


def words(text: str) -> list[str]:
    """Normalised words: lower case, without punctuation and articles.

    >>> words("An apple; the Pear-tree's")
    ['apple', 'peartrees']
    """
    return re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_NO_PUNCTUATION)).split()
