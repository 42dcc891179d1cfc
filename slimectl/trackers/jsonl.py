"""Writes metrics as JSON Lines. Equal metrics give equal bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slimectl.data.atomic_replace import storage_errors
from slimectl.trackers.base import TrackedRun
from slimectl.types import TableRow


class JsonlTracker:
    """Appends {"step": …, "metrics": {…}} to `path`, by default the run's tracked.jsonl, and flushes at every step.

    It also has times. The run's metrics.jsonl has only values that the seed determines.
    """

    def __init__(self, run: TrackedRun, *, path: str | None = None) -> None:
        self.path = Path(path) if path else run.folder / "tracked.jsonl"
        self.cut_back = path is None
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._append({"step": step, "metrics": dict(metrics)})

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Append a line with empty metrics and "table": name, "rows": […]."""
        self._append({"step": step, "metrics": {}, "table": name, "rows": list(rows)})

    def histogram(self, name: str, values: Sequence[float], *, step: int) -> None:
        """Append a line with empty metrics and "histogram": name, "counts": […] of ten bins, "edges": […]."""
        counts, edges = np.histogram(values, bins=10)
        self._append(
            {"step": step, "metrics": {}, "histogram": name, "counts": counts.tolist(), "edges": edges.tolist()}
        )

    def _append(self, line: dict[str, Any]) -> None:
        with storage_errors(self.path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()
