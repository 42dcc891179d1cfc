"""DeepScaleR's reward: grades only the text after the thinking."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slimectl.rewards.extraction import label_text
from slimectl.rewards.math import Math
from slimectl.rewards.verdict import Found, Verdict, Verifier, nothing
from slimectl.types import Sample

MARKERS = ("</think>", "###Response")


@dataclass(frozen=True)
class Deepscaler(Verifier):
    r"""`math` on the text after the last </think>, or where there is none after the last ###Response; else 0.0.

    >>> Deepscaler()(Sample(response=r"<think>\boxed{1}?</think> It is \boxed{2}.", label="2"))
    1.0

    Luo et al. 2025, "DeepScaleR: Surpassing O1-Preview with a 1.5B Model by Scaling RL", and its published reward: a
    response with neither marker has not finished thinking and earns nothing, whatever it has boxed.
    """

    def explain(self, sample: Sample) -> Verdict:
        label_text(sample, "deepscaler")
        answer = after_thinking(sample.response)
        if answer is None:
            return nothing("text after the thinking", f"neither {MARKERS[0]} nor {MARKERS[1]} in the response")
        inner = Math().explain(replace(sample, response=answer.text))
        return inner.moved(answer.start, "text after the thinking")

    def extract(self, sample: Sample) -> str | None:
        answer = after_thinking(sample.response)
        return None if answer is None else Math().extract(replace(sample, response=answer.text))


def after_thinking(text: str, markers: tuple[str, ...] = MARKERS) -> Found | None:
    """The text after the last occurrence of the first marker that occurs in it; None if no marker occurs."""
    for marker in markers:
        at = text.rfind(marker)
        if at >= 0:
            return Found(text[at + len(marker) :], at + len(marker))
    return None
