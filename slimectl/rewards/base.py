"""Base classes of verifiers, and grades, which hold a reward with its explanation so that they cannot disagree."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeGuard

from slimectl.errors import SettingsError
from slimectl.types import Sample

if TYPE_CHECKING:
    from slimectl.system.client import HttpClient

SHOWN = 60
"""Maximum length of quoted text in explanations, in characters."""


class Span(NamedTuple):
    """A part of a response: `text` is `response[start:end]`."""

    text: str
    start: int

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class Grade:
    r"""A verifier's grade of one response: the reward and its explanation.

    >>> Grade(1.0, r"last \boxed{}", "equals the label '0.5'", r"\frac12", (12, 19)).to_json()["from"]
    'last \\boxed{}'

    A reward of None means no opinion. `source` names the part of the response that was searched. `extracted` is the
    answer found there, or None. `span` has its start and end in the response, in characters, if it occurs there
    verbatim.
    """

    reward: float | dict[str, Any] | None
    source: str
    why: str
    extracted: str | None = None
    span: tuple[int, int] | None = None

    def moved(self, start: int, source: str) -> Grade:
        """Return the grade with its span shifted by `start`, for a grade of the part `source` of a response."""
        span = (start + self.span[0], start + self.span[1]) if self.span else None
        return replace(self, source=f"{self.source} of the {source}", span=span)

    def to_json(self) -> dict[str, Any]:
        """Return the explanation for metadata.explanation (`score --explain`). The reward is already in the sample."""
        span = list(self.span) if self.span else None
        return {"extracted": self.extracted, "from": self.source, "span": span, "why": self.why}


class Verifier(ABC):
    """Grades samples. It is picklable. It raises on a bad label or bad metadata, never on model output."""

    ALIASES: ClassVar[dict[str, str]] = {}
    """Older names of options."""

    BOXED_OPTIONS: ClassVar[dict[str, Any] | None] = None
    """Options with which it reads the last box itself, or None if the prefix `boxed_` passes it only the box."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest possible reward, or for a dict of its "score"."""
        return 0.0, 1.0

    @abstractmethod
    def explain(self, sample: Sample) -> Grade:
        """Grade a sample: the reward, the graded text and the reason."""

    @abstractmethod
    def extract(self, sample: Sample) -> str | None:
        """Return the part of the response that is graded, or None."""

    def same_answer(self, sample: Sample, first: str, second: str) -> bool:
        """Whether a majority vote counts two answers to a prompt as the same. By default their spelling must match."""
        return first == second

    def __call__(self, sample: Sample) -> float | dict[str, Any] | None:
        grade = self.explain(sample)
        if not isinstance(grade, Grade):
            raise TypeError(f"explain returned {type(grade).__name__}, not a Grade")
        return grade.reward

    @property
    def slow(self) -> bool:
        """Whether grading an adversarial answer can take seconds. If so, worker processes grade by default."""
        return False

    def prepare(self) -> None:
        """Import what grading needs. Called once per worker process, before the first sample's time starts."""
        return

    @property
    def is_async(self) -> bool:
        """Whether grading mostly waits for a server. If so, `grade_async` grades many samples at once."""
        return False

    @property
    def together(self) -> int:
        """Maximum number of samples per request."""
        return 1

    @property
    def takes_groups(self) -> bool:
        """Whether one request may hold all samples of a group."""
        return False

    @property
    def patience_s(self) -> float:
        """Maximum time in seconds to wait for one sample."""
        return 0.0

    @property
    def runs_user_code(self) -> bool:
        """Whether it calls a user's function."""
        return False

    def grade_all(self, samples: Sequence[Sample]) -> list[Grade]:
        """Grade the samples of one call."""
        if len(samples) == 1:
            return [self.explain(samples[0])]
        from slimectl.system.client import run_sync

        return run_sync(lambda http: self.grade_async(samples, http))

    async def grade_async(self, samples: Sequence[Sample], http: HttpClient) -> list[Grade]:
        """Grade several samples asynchronously. By default, call `explain` for each."""
        return [self.explain(sample) for sample in samples]


class Remote(Verifier):
    """Grades through a server. Raises BackendError if the request fails, but never on model output."""

    is_async = True

    @abstractmethod
    async def grade_async(self, samples: Sequence[Sample], http: HttpClient) -> list[Grade]: ...

    def explain(self, sample: Sample) -> Grade:
        from slimectl.system.client import run_sync

        return run_sync(lambda http: self.grade_async([sample], http))[0]


def check_url(url: str) -> None:
    """Raise SettingsError if `url` is not an HTTP address."""
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"score.rm_options.url: {url!r} is not an address. Write http://HOST:PORT/PATH.")


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether the value is a finite number that fits a float. JSON also allows NaN and integers of any length."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def quote(text: str) -> str:
    """Quote a text for an explanation, on one line, without the middle of a long text."""
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}…{text[-(SHOWN // 2) :]}"
    return repr(text)


def binary_grade(
    right: bool, source: str, answer: Span, label: str, relations: tuple[str, str] = ("is", "is not"), note: str = ""
) -> Grade:
    """Grade an extracted answer with 1.0 or 0.0. `relations` are the phrases for a right and a wrong answer."""
    reason = f"{relations[not right]} the label {quote(label)}{note}"
    return Grade(float(right), source, reason, answer.text, answer.span)


def no_answer(source: str, reason: str, reward: float | dict[str, Any] = 0.0) -> Grade:
    """Return the grade of a response without an answer."""
    return Grade(reward, source, reason)
