"""A reward and how it came about, so that a grade and its explanation cannot disagree."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeGuard

from slimectl.types import Sample

if TYPE_CHECKING:
    from slimectl.rewards.asking import Asker

SHOWN = 60
"""Characters of a text that an explanation quotes."""


class Found(NamedTuple):
    """A part of a response: `text` is `response[start:end]`."""

    text: str
    start: int

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class Verdict:
    r"""What a verifier says of one response.

    >>> Verdict(1.0, r"last \boxed{}", "equals the label '0.5'", r"\frac12", (12, 19)).to_json()["from"]
    'last \\boxed{}'

    `source` says where the answer was looked for, `extracted` what was found there (None: nothing) and `span` where
    in the response it begins and ends, in characters, if it stands there to the letter.
    """

    reward: float | dict[str, Any]
    source: str
    why: str
    extracted: str | None = None
    span: tuple[int, int] | None = None

    def moved(self, start: int, source: str) -> Verdict:
        """The same verdict, of a part of the response that begins at `start` and is called `source`."""
        span = (start + self.span[0], start + self.span[1]) if self.span else None
        return replace(self, source=f"{self.source} of the {source}", span=span)

    def to_json(self) -> dict[str, Any]:
        """The explanation as `score --explain` writes it into metadata.explanation; the reward is in the sample."""
        where = list(self.span) if self.span else None
        return {"extracted": self.extracted, "from": self.source, "span": where, "why": self.why}


class Verifier(ABC):
    """Grades a sample; a picklable value. Raises on a bad label or metadata, never on what a model wrote."""

    ALIASES: ClassVar[dict[str, str]] = {}
    """Older names of options."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest reward that there is; of a dict, the number under "score"."""
        return 0.0, 1.0

    @abstractmethod
    def explain(self, sample: Sample) -> Verdict:
        """The reward, with what was graded and why it is what it is."""

    @abstractmethod
    def extract(self, sample: Sample) -> str | None:
        """What of the response is graded; None where nothing was found."""

    def __call__(self, sample: Sample) -> float | dict[str, Any]:
        return self.explain(sample).reward

    @property
    def waits(self) -> bool:
        """Whether grading is mostly waiting for somebody else: then many are asked for at once, by `asked`."""
        return False

    @property
    def together(self) -> int:
        """How many samples one question may be about."""
        return 1

    @property
    def takes_groups(self) -> bool:
        """Whether one question may be about all siblings."""
        return False

    @property
    def patience_s(self) -> float:
        """Seconds that the waiting for one sample may take."""
        return 0.0

    async def asked(self, samples: Sequence[Sample], asker: Asker) -> list[Verdict]:
        """What `explain` says of each."""
        return [self.explain(sample) for sample in samples]


class Remote(Verifier):
    """Grades by asking a server. Raises BackendError where that fails, whatever a model wrote."""

    @property
    def waits(self) -> bool:
        return True

    @abstractmethod
    async def asked(self, samples: Sequence[Sample], asker: Asker) -> list[Verdict]: ...

    def explain(self, sample: Sample) -> Verdict:
        from slimectl.rewards.asking import finished

        return finished(lambda asker: self.asked([sample], asker))[0]


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is a finite number that a float can hold; JSON also has NaN, and integers of any length."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def shown(text: str) -> str:
    """A text as an explanation quotes it: in quotes, on one line, its middle left out if it is long."""
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}…{text[-(SHOWN // 2) :]}"
    return repr(text)


def graded(
    right: bool, source: str, found: Found, label: str, words: tuple[str, str] = ("is", "is not"), note: str = ""
) -> Verdict:
    """The verdict on an answer that was found: 1.0 or 0.0; `words` are how the right and the wrong one relate."""
    return Verdict(float(right), source, f"{words[not right]} the label {shown(label)}{note}", found.text, found.span)


def nothing(source: str, why: str, reward: float | dict[str, Any] = 0.0) -> Verdict:
    """The verdict where there is nothing to grade."""
    return Verdict(reward, source, why)
