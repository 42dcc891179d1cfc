"""A tracker of another package, with a section of its own in the settings."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence

from slimectl.settings.base import Section
from slimectl.trackers.base import TrackedRun
from slimectl.types import TableRow


class CsvSettings(Section):
    """Where the rows go, and what separates their columns."""

    file: str = "metrics.csv"
    """Name of the file in the run's folder."""

    delimiter: str | None = ","
    """What separates columns; a tab where it is none."""


class CsvTracker:
    """Appends `step,name,value` to a file."""

    settings_class = CsvSettings

    def __init__(self, run: TrackedRun, *, settings: CsvSettings) -> None:
        self._file = (run.folder / settings.file).open("a", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file, delimiter=settings.delimiter or "\t")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._rows.writerows((step, name, value) for name, value in metrics.items())
        self._file.flush()

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        self._rows.writerows((step, name, *row.values()) for row in rows)

    def close(self) -> None:
        self._file.close()
