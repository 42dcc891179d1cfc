"""Writes the timeline of a run as a trace for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slimectl.cli.viewer.library import Library
from slimectl.data.atomic_replace import write_text
from slimectl.errors import SettingsError
from slimectl.stages.request_times import PARTS
from slimectl.system.timeline import Span

Event = dict[str, Any]
"""An event of the Trace Event Format. Times are microseconds since the start of the run."""
ORDER = (
    "rounds",
    "trainer",
    "rank",
    "weights",
    "checkpoints",
    "generation",
    "grading",
    "engine",
    "tools",
    "evaluation",
)
"""Lanes from top to bottom."""
OVERLAP_S = 2e-6
"""Times are rounded to microseconds, so spans that follow each other may overlap by this much."""


def write_trace(path: Path, file: Path) -> str:
    """Write the trace of a run. Return a line about it. Raises SettingsError for a path without a timeline."""
    runs = list(Library([path]).runs.values()) if path.is_dir() else []
    if len(runs) != 1:
        raise SettingsError(f"{path}: is not a run. --perfetto needs the folder of one run (runs/NAME)")
    spans, offset, more = list[Span](), 0, True
    while more:
        answer = runs[0].timeline(offset)
        offset, more = answer["offset"], answer["more"]
        spans += answer["spans"]
    if not spans:
        raise SettingsError(
            f"{path}: has no timeline.jsonl with spans. A run writes it from its first round on, unless track.timeline "
            f"is false"
        )
    events = list(trace_events(spans, runs[0].path.name))
    write_text(file, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")))
    return f"{file}: {len(spans)} spans. Open it at https://ui.perfetto.dev"


def trace_events(spans: Sequence[Span], name: str) -> Iterator[Event]:
    """Yield the events of spans: a process per lane, with a thread for each row of spans that overlap.

    A request contains slices of its queue, prefill and decode times. A process of its own shows the rounds.
    """
    start = min(span["start"] for span in spans)
    lanes: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted([*_rounds(spans), *spans], key=lambda span: span["start"]):
        lanes[span["lane"]].append(span)
    for number, lane in enumerate(sorted(lanes, key=_rank), 1):
        title = f"{name}: rounds" if lane == "rounds" else lane
        label = {"ph": "M", "cat": "__metadata", "ts": 0, "pid": number, "tid": 1}
        yield label | {"name": "process_name", "args": {"name": title}}
        yield label | {"name": "process_sort_index", "args": {"sort_index": number}}
        for thread, row in enumerate(_rows(lanes[lane]), 1):
            yield label | {"tid": thread, "name": "thread_name", "args": {"name": lane}}
            for span in row:
                place = {"ph": "X", "pid": number, "tid": thread, "cat": lane.partition("/")[0]}
                for slice_name, first, last, fields in _slices(span):
                    moment, end = _microseconds(first - start), _microseconds(last - start)
                    times = {"ts": moment, "dur": end - moment}
                    yield place | {"name": slice_name} | times | ({"args": fields} if fields else {})


def _slices(span: Span) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Yield (name, start, end, fields) of a span and of the parts of a request."""
    fields = {key: value for key, value in span.items() if key not in ("lane", "name", "start", "end")}
    end = max(span["start"], span["end"])
    yield span["name"], span["start"], end, fields
    moment = span["start"]
    if all(isinstance(span.get(part), int | float) for part in PARTS):
        for part in PARTS:
            yield part, moment, min(end, moment + span[part]), {}
            moment = min(end, moment + span[part])


def _microseconds(seconds: float) -> int:
    return round(1e6 * seconds)


def _rounds(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield a span for every round, from the trainer's first span in it to the last."""
    ends: dict[int, tuple[float, float]] = {}
    for span in spans:
        if span["lane"] == "trainer" and span["name"] != "load" and isinstance(number := span.get("round"), int):
            first, last = ends.get(number, (span["start"], span["end"]))
            ends[number] = min(first, span["start"]), max(last, span["end"])
    for number, (first, last) in ends.items():
        yield {"lane": "rounds", "name": f"round {number}" if number else "start", "start": first, "end": last}


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Return spans, which are sorted by their start, in rows without overlap."""
    rows: list[list[Span]] = []
    free: list[tuple[float, int]] = []  # (end of a row, its number)
    for span in spans:
        if free and free[0][0] <= span["start"] + OVERLAP_S:
            end, number = heapq.heappop(free)
            span = span | {"start": max(end, span["start"])}
        else:
            number = len(rows)
            rows.append([])
        rows[number].append(span)
        heapq.heappush(free, (span["end"], number))
    return rows


def _rank(lane: str) -> tuple[int, int, str]:
    name, _, number = lane.partition("/")
    return ORDER.index(name) if name in ORDER else len(ORDER), int(number) if number.isdecimal() else 0, lane
