"""Results of a reliability campaign: how many attacks were tried and survived, by category.

A campaign is a script of this folder: it draws attacks from a seed, carries each out against the real program, and
records whether the program survived. It prints one Markdown table for docs/reliability.md and every failure in a line.

    campaign = Campaign("serve requests", seed=1)
    campaign.record("foreign origin", "POST /generate with Origin: http://evil.test", survived=status == 403)
    raise SystemExit(campaign.finish())
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """An attack that the program did not survive."""

    category: str
    attack: str
    observation: str


@dataclass
class Campaign:
    """Counts attacks by category and keeps every failure."""

    title: str
    seed: int
    _tried: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _failures: list[Failure] = field(default_factory=list)

    def record(self, category: str, attack: str, *, survived: bool, observation: str = "") -> None:
        """Count one attack; `observation` says what the program did where it failed."""
        self._tried[category] += 1
        if not survived:
            self._failures.append(Failure(category, attack, observation))

    def finish(self) -> int:
        """Print the table and the failures; return the exit code, 1 if anything failed."""
        failed: defaultdict[str, int] = defaultdict(int)
        for failure in self._failures:
            failed[failure.category] += 1
        total = sum(self._tried.values())
        print(f"\n{self.title}, seed {self.seed}: {total - len(self._failures)} of {total} survived\n")
        print("| attack | tried | survived |\n|---|---|---|")
        for category, tried in self._tried.items():
            print(f"| {category} | {tried} | {tried - failed[category]} |")
        for failure in self._failures:
            print(f"FAILED {failure.category}: {failure.attack}: {failure.observation}")
        return int(bool(self._failures))
