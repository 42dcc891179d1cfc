"""Metrics as JSON lines; the same numbers give the same bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from slimectl.data.rundir import explained_storage


class JsonlTracker:
    """Appends {"step": …, "metrics": {…}} to a file, flushed at every step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained_storage(path):
            self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        with explained_storage(self.path):
            self._file.write(json.dumps({"step": step, "metrics": dict(metrics)}) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()
