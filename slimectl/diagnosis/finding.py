"""A finding: a trouble of a run, with its evidence, likely causes and remedies."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Severity = Literal["error", "warning", "advice"]
"""error: further rounds are wasted. warning: the run may go wrong. advice: the run could be faster."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "advice")
"""Most severe first."""


@dataclass(frozen=True)
class Evidence:
    """Values of one metric in some rounds."""

    metric: str
    rounds: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Finding:
    """A trouble of a run from its first round to its last."""

    kind: str
    """Name of the trouble, such as "no-signal". It is an anchor in docs/reference/findings.md."""
    title: str
    """The trouble with its figures, in one line."""
    severity: Severity
    first_round: int
    last_round: int | None
    """None while the trouble lasts."""
    evidence: tuple[Evidence, ...]
    commands: tuple[str, ...]
    """Shell commands that show samples, or the cause."""
    causes: tuple[str, ...]
    """Likeliest first."""
    remedies: tuple[str, ...]
    """Settings with values, or actions, in the order in which to try them."""

    @property
    def link(self) -> str:
        """The section of the documentation about this kind of finding."""
        return f"docs/reference/findings.md#{self.kind}"

    @property
    def lasts(self) -> bool:
        return self.last_round is None

    @property
    def place(self) -> str:
        """The rounds of the finding as text."""
        if self.last_round is None:
            return f"since round {self.first_round}"
        if self.last_round == self.first_round:
            return f"round {self.first_round}"
        return f"rounds {self.first_round} to {self.last_round}"

    def message(self, run: Path) -> str:
        """Return the line about a finding that begins, for the log."""
        return f"{self.title} ({self.place}). {self.remedies[0]}. More: slimectl diagnose {shlex.quote(str(run))}"

    def to_json(self) -> dict[str, Any]:
        """Return the finding as `slimectl diagnose --json` prints it."""
        return asdict(self) | {"link": self.link}
