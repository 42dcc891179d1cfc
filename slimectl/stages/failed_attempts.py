"""Counts failed attempts, warns about them, and stops a stage if too many have failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from slimectl.errors import SlimectlError
from slimectl.settings.checks import OF_ATTEMPTS
from slimectl.settings.rollout import RolloutSettings
from slimectl.system.stdio import logger, quantity
from slimectl.types import Sample, Status


@dataclass(slots=True)
class FailureCount:
    """Counts attempts and their failures. The samples of one attempt have the same index."""

    attempts: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    cause: str = ""
    """Error of the first failed attempt."""

    def add(self, sample: Sample) -> None:
        self.attempts.add(sample.index)
        if sample.status is Status.FAILED:
            self.cause = self.cause or str(sample.metadata.get("error") or "no error message")
            self.failed.add(sample.index)

    def __str__(self) -> str:
        return f"{len(self.failed)} of {quantity(len(self.attempts), 'attempt')} failed"

    @property
    def with_cause(self) -> str:
        return f"{self}, the first with {self.cause}"

    def check(self, settings: RolloutSettings, text: str) -> None:
        """Raise SlimectlError, which starts with `text`, if all attempts or more than `max_failed` of them failed."""
        share, limit = len(self.failed) / max(1, len(self.attempts)), settings.max_failed
        if self.failed and (share == 1 or share > limit):
            above = "" if share == 1 else f" This is more than rollout.max_failed = {limit:g}."
            raise SlimectlError(f"{text}.{above} Fix {attempt_setting(settings)}.")


def attempt_setting(settings: RolloutSettings) -> str:
    """Return the setting whose program or function makes the attempts, with its value."""
    name = next((name for name in OF_ATTEMPTS if getattr(settings, name)), None)
    return "the agent that the samples name" if name is None else f"rollout.{name} = {getattr(settings, name)!r}"


def warn_of_failure(sample: Sample, count: int) -> None:
    """Log the failure of an attempt. Of many, log the first, the tenth, the hundredth and so on."""
    if str(count).rstrip("0") == "1":
        total = "" if count == 1 else f" ({count} attempts have failed)"
        logger.warning(f"attempt {sample.index} failed: {sample.metadata.get('error')}{total}")
