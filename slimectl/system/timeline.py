"""Spans of time that the parts of a run record in their processes, for timeline.jsonl."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Span = dict[str, Any]
"""A line of timeline.jsonl: lane, name, start and end in seconds since 1970, and further fields (docs/records.md)."""

MOST = 1 << 17
"""Number of spans after which the oldest are lost, if nothing takes them."""

TO_WALL_CLOCK = time.time() - time.perf_counter()
"""Offset that makes times of different processes comparable.

On Linux `perf_counter` counts from the same moment in all processes of a machine.
"""


class Timeline:
    """Spans of this process until they are taken. Any thread may record. Times come from `time.perf_counter`."""

    def __init__(self) -> None:
        self.enabled = False
        self._spans: deque[Span] = deque(maxlen=MOST)

    def start(self, *, enabled: bool = True) -> None:
        """Record from now on, or not at all. Earlier spans are dropped."""
        self.enabled = enabled
        self._spans.clear()

    def record(self, lane: str, name: str, start: float, end: float | None = None, **fields: Any) -> None:
        """Add a span that ends at `end`, or now."""
        if self.enabled:
            self._spans.append(span(lane, name, start, time.perf_counter() if end is None else end, **fields))

    @contextmanager
    def block(self, lane: str, name: str, **fields: Any) -> Iterator[None]:
        """Add a span of the block, also if it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.record(lane, name, start, **fields)

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans of another process."""
        if self.enabled:
            self._spans.extend(spans)

    def take(self) -> list[Span]:
        """Return the spans in the order of their ends, and forget them."""
        spans = []
        while self._spans:
            spans.append(self._spans.popleft())
        return spans


def span(lane: str, name: str, start: float, end: float, **fields: Any) -> Span:
    """Return a span between two times of `time.perf_counter`, rounded to microseconds."""
    start, end = round(start + TO_WALL_CLOCK, 6), round(end + TO_WALL_CLOCK, 6)
    return {"lane": lane, "name": name, "start": start, "end": end, **fields}


timeline = Timeline()
"""The spans of this process."""


def take_spans() -> list[Span]:
    """Return the new spans of the process that this is called in."""
    return timeline.take()
