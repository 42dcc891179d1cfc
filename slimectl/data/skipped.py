"""Lines that were left out with --on-error skip: the first few named as they come, all counted by reason."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable

from slimectl.errors import RecordError

NAMED = 5
"""Lines that are named one by one."""
REASONS = 5
"""Reasons that are listed at the end."""
LONGEST_REASON = 100


class SkippedLines:
    """Counts the lines of one file that were left out; `say` takes words for a person.

    >>> skipped = SkippedLines("a.jsonl", print)
    >>> skipped.add_bad_line(RecordError("a.jsonl:2: not JSON: Extra data at column 3"))
    skipped: a.jsonl:2: not JSON: Extra data at column 3
    >>> skipped.report()
    a.jsonl: 1 of 1 lines skipped: 1 not JSON: Extra data at column 3
    """

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self._lines = 0
        self._reasons: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._locations: deque[str] = deque()

    @property
    def count(self) -> int:
        """Lines left out."""
        return self._reasons.total()

    def add_line(self, location: str) -> None:
        """Note a good line, FILE:LINE; what comes of its sample is told in the same order."""
        self._lines += 1
        self._locations.append(location)

    def pass_line(self) -> str:
        """Note that the next of the good lines has been dealt with; return where it stands."""
        return self._locations.popleft() if self._locations else ""

    def add_bad_line(self, error: RecordError) -> None:
        """Note a line that is no record."""
        self._lines += 1
        self._add(str(error))

    def add_ungraded(self, error: RecordError) -> None:
        """Note that the next of the good lines cannot be graded."""
        self._add(f"{self.pass_line()}: {error}")

    def add_earlier(self) -> None:
        """Note that the next of the good lines was left out by the same work before it was cut off."""
        self.pass_line()
        self._count("left out before", "left out before")

    def _add(self, text: str) -> None:
        if self.count < NAMED:
            self._say(f"skipped: {text}")
        reason = re.sub(r"^.*?:\d+: |\bsample \d+: ", "", text)
        self._count(re.sub(r"'[^']*'|\"[^\"]*\"|-?\d+", "…", reason), reason)

    def _count(self, kind: str, example: str) -> None:
        self._reasons[kind] += 1
        self._examples.setdefault(kind, example)

    def report(self) -> None:
        """Say how many lines were left out, and why, where any was."""
        if not self.count:
            return
        reasons = [f"{count} {self._shortened(kind)}" for kind, count in self._reasons.most_common(REASONS)]
        others = self.count - sum(count for _, count in self._reasons.most_common(REASONS))
        reasons += [f"{others} for other reasons"] if others else []
        self._say(f"{self._name}: {self.count} of {self._lines} lines skipped: {'; '.join(reasons)}")

    def _shortened(self, kind: str) -> str:
        example = self._examples[kind]
        return example if len(example) <= LONGEST_REASON else f"{example[:LONGEST_REASON]}…"


def locate(error: RecordError, location: str) -> RecordError:
    """Return the error with FILE:LINE in front, where it has none."""
    name = location.rpartition(":")[0]
    if not name or str(error).startswith(f"{name}:"):
        return error
    return RecordError(f"{location}: {error}")
