"""The result of one check, of this machine (`slimectl doctor`) or of a command (`--dry-run`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimectl.system.redaction import redact_text


@dataclass(frozen=True)
class CheckResult:
    """Result of one check. `fine` is None for information and for warnings, which do not fail the command."""

    what: str
    fine: bool | None
    detail: str
    exit_code: int = 1
    """Exit code of the command if the check failed."""

    remedy: str = ""
    """What to do next, for a failure or a warning."""

    warns: bool = False

    @property
    def status(self) -> str:
        """Return ok, FAIL, warn, or - for information."""
        return "warn" if self.warns else {True: "ok", False: "FAIL", None: "-"}[self.fine]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON, with `fine` null for information and warnings."""
        return {
            "check": self.what,
            "fine": self.fine,
            "status": "info" if self.status == "-" else self.status.lower(),
            "detail": redact_text(self.detail),
            "remedy": redact_text(self.remedy),
        }

    def __str__(self) -> str:
        return redact_text(f"{self.status:<5} {self.what:<22} {self.detail}")


def info(what: str, detail: str) -> CheckResult:
    """Return plain information."""
    return CheckResult(what, None, detail)


def passed(what: str, detail: str) -> CheckResult:
    return CheckResult(what, True, detail)


def warning(what: str, detail: str, remedy: str) -> CheckResult:
    """Return a finding that slows down or may break a run."""
    return CheckResult(what, None, detail, remedy=remedy, warns=True)


def failure(what: str, detail: str, remedy: str) -> CheckResult:
    """Return a finding that breaks a run."""
    return CheckResult(what, False, detail, remedy=remedy)
