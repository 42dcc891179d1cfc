"""Points of a resumed run that a library already has."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slimectl.data.metrics_catalogue import axis_of
from slimectl.system.stdio import logger
from slimectl.trackers.base import first_line

Point = tuple[str, float, float | None]
"""Metric, train step, and the position on the metric's own axis if the library stores it."""
BLOCK, CHUNK_HEADER, FILE_HEADER = 32768, 7, 7
FIRST_CHUNKS, LAST_CHUNKS = (1, 2), (1, 4)
"""Kinds of chunks that begin and end a record. Kind 1 does both."""


class History:
    """Points that are not sent again. A killed process may have lost its last points, but no earlier ones.

    `by_axis` is whether a metric may have several points at one train step, for example from a round without a step.
    """

    def __init__(self, points: Iterable[Point] = (), *, by_axis: bool = True) -> None:
        self._points = set(points)
        self._by_axis = by_axis
        self._steps = {(name, step) for name, step, _ in self._points}

    @classmethod
    def read(cls, library: str, points: Callable[[], Iterable[Point]], *, by_axis: bool = True) -> History | None:
        """Return the history of points read from a library's files, or None, with a warning, if that fails."""
        try:
            return cls(points(), by_axis=by_axis)
        except Exception as error:  # another version of the library, or a damaged file
            logger.warning(
                f"track.with: cannot read the run's records at {library} ({first_line(error)}). Points of its last "
                f"seconds may be missing."
            )
            return None

    def missing(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Return the metrics that the library lacks, with their axes, or an empty dict if it has them all."""
        if not self._points:
            return dict(metrics)
        row = {"train/step": step, **metrics}
        new = {name for name in metrics if not self.has(name, step, place=row.get(axis_of(name)))}
        if all(name.endswith("/step") for name in new):
            return {}
        return {name: value for name, value in metrics.items() if name in new or name.endswith("/step")}

    def has(self, name: str, step: int, *, place: float | None = None) -> bool:
        """Return whether the library has a metric or table at a step, and at `place` on its axis if that is given.

        wandb adds the axis to rows that lack it.
        """
        if place is None or not self._by_axis:
            return (name, step) in self._steps
        return (name, step, place) in self._points


def points_of(rows: Iterable[Mapping[str, Any]], step: str = "train/step") -> Iterator[Point]:
    """Yield the points of metric rows. `step` is the key of the train step. Rows without it are not metrics."""
    for row in rows:
        if step in row:
            step_row = {"train/step": row[step], **row}
            yield from ((name, row[step], step_row.get(axis_of(name))) for name in step_row)


def log_records(file: Path) -> Iterator[bytes]:
    """Yield the records of a file in the log format of LevelDB, as wandb and SwanLab write. The last may be cut off.

    The format: seven bytes specific to the library, then blocks of chunks (crc32, length, kind), padded with zeros.
    """
    data, at, record = file.read_bytes(), FILE_HEADER, b""
    while at + CHUNK_HEADER <= len(data):
        if BLOCK - at % BLOCK < CHUNK_HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += CHUNK_HEADER
        if at + length > len(data):
            return  # the process died in the middle of it
        record = (b"" if kind in FIRST_CHUNKS else record) + data[at : at + length]
        at += length
        if kind in LAST_CHUNKS:
            yield record
