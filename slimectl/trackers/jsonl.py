"""Metrics as JSON Lines; equal metrics give equal bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slimectl.data.run_dir import storage_errors
from slimectl.types import TableRow


class JsonlTracker:
    """Appends {"step": …, "metrics": {…}} to a file, flushed at every step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors(path):
            self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._append({"step": step, "metrics": dict(metrics)})

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Append a line with empty metrics and "table": name, "rows": […]."""
        self._append({"step": step, "metrics": {}, "table": name, "rows": list(rows)})

    def _append(self, line: dict[str, Any]) -> None:
        with storage_errors(self.path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()
