"""Reports lines skipped with --on-error skip: the first few individually, all counted by reason."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable

from slimectl.errors import RecordError

NAMED = 5
"""Number of lines that are reported individually."""
REASONS = 5
"""Number of reasons that are listed at the end."""
LONGEST_REASON = 100
LOCATION = re.compile(r"\S+:\d+: ")


class SkippedLines:
    """Counts the skipped lines of one file. `say` prints a message.

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
        """Number of skipped lines."""
        return self._reasons.total()

    def add_line(self, location: str) -> None:
        """Record a good line, FILE:LINE. The results of samples are reported in the same order."""
        self._lines += 1
        self._locations.append(location)

    def count_line(self, location: str) -> None:
        """Record a good line whose result is not reported later."""
        self._lines += 1

    def pass_line(self) -> str:
        """Record that the next good line is finished. Return its FILE:LINE."""
        return self._locations.popleft() if self._locations else ""

    def add_bad_line(self, error: RecordError) -> None:
        """Record a line that is not a valid record."""
        self._lines += 1
        self._add(str(error))

    def add_ungraded(self, error: RecordError) -> None:
        """Record that the next good line cannot be graded."""
        self._add(f"{self.pass_line()}: {error}")

    def add_earlier(self) -> None:
        """Record that the next good line was already skipped before the work was interrupted."""
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
        """Report the number of skipped lines and the reasons, if any."""
        if not self.count:
            return
        reasons = [f"{count} {self._shortened(kind)}" for kind, count in self._reasons.most_common(REASONS)]
        other_count = self.count - sum(count for _, count in self._reasons.most_common(REASONS))
        reasons += [f"{other_count} for other reasons"] if other_count else []
        self._say(f"{self._name}: {self.count} of {self._lines} lines skipped: {'; '.join(reasons)}")

    def _shortened(self, kind: str) -> str:
        example = self._examples[kind]
        return example if len(example) <= LONGEST_REASON else f"{example[:LONGEST_REASON]}…"


def locate(error: RecordError, location: str) -> RecordError:
    """Return the error prefixed with FILE:LINE, unless it already begins with a location."""
    if not location or str(error).startswith(f"{location.rpartition(':')[0]}:") or LOCATION.match(str(error)):
        return error
    return RecordError(f"{location}: {error}")
