"""How answers are graded."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import Field

from slimectl.settings.base import Section

SYMBOLIC = ("math", "boxed_math")
"""Verifiers whose work on a hostile answer only a time limit bounds."""


class ScoreSettings(Section):
    """Samples in, rewarded samples out."""

    rm_type: str | None = None
    """Verifier: math, exact, contains, numeric, regex, reasoning_gym, …; a prompt's metadata.rm_type goes first."""

    rm_options: dict[str, Any] = {}
    """Options of the verifier, e.g. {pattern = "Answer: (.*)"} for regex."""

    custom_rm_path: str | None = None
    """Your own reward function, by path; it goes before rm_type."""

    reward_key: str | None = None
    """Which number of a dict reward is trained on."""

    timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds one sample may take; past it the sample gets reward 0 and metadata.reward_error."""

    workers: Annotated[int, Field(ge=0)] | None = None
    """Worker processes; 0 grades in this process, without the time limit. Where not given: one for each core, at most
    4, for an rm_type that does symbolic mathematics, else 0."""

    @property
    def processes(self) -> int:
        """How many workers there will be."""
        if self.workers is not None:
            return self.workers
        symbolic = self.rm_type in SYMBOLIC and not self.custom_rm_path
        return min(4, os.cpu_count() or 1) if symbolic else 0
