"""Trackio tracker."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from slimectl.errors import requiring
from slimectl.trackers.arguments import Accepted, parameters
from slimectl.trackers.base import TrackedRun, starting
from slimectl.trackers.history import History, points_of
from slimectl.types import TableRow

WAY_OUT = "Set TRACKIO_DIR to a folder that can be written, or drop trackio from track.with"


class TrackioTracker:
    """One Trackio run in the user's own Trackio folder (TRACKIO_DIR, or track.dir), which `trackio show` opens.

    Every metric is on the train step. `kwargs` overrides all other arguments of `trackio.init`: with `space_id` it
    writes to a Hugging Face Space. `tags` are stored in the run's configuration. Raises MissingExtraError without the
    library, BackendError if it cannot start.
    """

    def __init__(self, run: TrackedRun, **kwargs: Any) -> None:
        if run.log_dir is not None:
            os.environ.setdefault("TRACKIO_DIR", str(run.log_dir))  # read once, when the library is imported
        with requiring("trackio", extra="trackio", wanted_by="track.with"):
            import trackio
        identity = run.identity()
        arguments: dict[str, Any] = {
            "project": identity.project,
            "name": identity.name or identity.run_id,
            "group": identity.group,
            "config": identity.config,
            "resume": "allow",
            "embed": False,
            # They start their own threads. Memory and time are already metrics of the run.
            "auto_log_gpu": False,
            "auto_log_cpu": False,
        }
        with starting("trackio", way_out=WAY_OUT), redirect_stdout(sys.stderr):
            arguments |= kwargs
            if "tags" in arguments and "tags" not in parameters(trackio.init):  # Trackio 0.43
                arguments["config"] = {**(arguments["config"] or {}), "tags": arguments.pop("tags")}
            self._run: Any = trackio.init(**arguments)
            self._is_local = bool(getattr(self._run, "_is_local", False))
            history: History | None = History() if self._is_local else None  # a Space keeps the points it received
            if run.resumed and self._is_local:
                history = History.read("trackio", lambda: points_of(_rows(arguments), step="step"))
            self.skips_held, self.keeps_lines = history is not None, history is None
            self._history = history or History()

    @staticmethod
    def accepted_arguments() -> Accepted:
        """Return the arguments of `trackio.init`."""
        import trackio

        return parameters(trackio.init) | {"tags": None}

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if metrics := self._history.missing(metrics, step):
            self._run.log(metrics, step=step)

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        import trackio

        if self._history.has(name, step):
            return
        columns = list(rows[0])
        table = trackio.Table(columns=columns, data=[[row[column] for column in columns] for row in rows])
        self._run.log({name: table}, step=step)

    def histogram(self, name: str, values: Sequence[float], *, step: int) -> None:
        import trackio

        if not self._history.has(name, step):
            self._run.log({name: trackio.Histogram(values)}, step=step)

    def flush(self) -> None:
        """Write data that Trackio 0.43 holds back, half a second of lines, to the database."""
        if self._is_local and hasattr(self._run, "_flush_queues_inline"):
            with self._run._client_lock:
                self._run._flush_queues_inline()

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


def _rows(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the run in Trackio's database."""
    import trackio

    storage = trackio.SQLiteStorage  # type: ignore[attr-defined] # its own Api reads this
    rows: list[dict[str, Any]] = storage.get_logs(arguments["project"], arguments["name"])
    return rows
