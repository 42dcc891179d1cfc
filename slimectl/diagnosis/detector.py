"""A detector: a function of a run's history, and the texts about what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slimectl.diagnosis.finding import Severity
from slimectl.diagnosis.history import History


@dataclass(frozen=True)
class Observation:
    """What a detector sees in the last round."""

    title: str
    """The trouble with its figures."""
    metrics: tuple[str, ...] = ()
    """Metrics whose last values are the evidence."""
    causes: tuple[str, ...] = ()
    """Causes that this round points at. They precede the detector's own causes."""
    remedies: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    first: int | None = None
    """First round with the trouble, if it is an earlier one."""


@dataclass(frozen=True)
class Detector:
    """One kind of finding. Texts may contain {run}, the run's folder."""

    kind: str
    severity: Severity
    find: Callable[[History], Observation | None]
    healthy: str
    """What a healthy run has, for the documentation."""
    causes: tuple[str, ...]
    remedies: tuple[str, ...]
    commands: tuple[str, ...] = ()
    after: Literal["round", "evaluation"] = "round"
    patience: int = 3
    """Rounds, or evaluations, in a row with the trouble before the finding begins."""
    recovery: int = 3
    """Rounds, or evaluations, in a row without the trouble before it ends."""
