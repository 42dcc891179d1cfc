"""SwanLab tracker."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from slimectl.data.metrics_catalogue import axis_of
from slimectl.errors import requiring
from slimectl.trackers.arguments import Accepted, fields, parameters
from slimectl.trackers.base import TrackedRun, is_offline, starting
from slimectl.trackers.history import History, Point, log_records
from slimectl.types import TableRow

WAY_OUT = 'Set SWANLAB_API_KEY (or run `swanlab login`), or track.mode = "offline", or drop swanlab from track.with'

NAMES = {"experiment_name": "name", "logdir": "log_dir", "notes": "description"}
"""Older names of arguments, which swanlab.init ignores if the current names are also given."""

HELD_BACK_S = 0.75
"""Seconds after which SwanLab's thread has written a line. It waits half a second for the next line."""


class SwanlabTracker:
    """One SwanLab experiment, in a folder `swanlab`. Each metric has its own axis, or with `one_axis` the train step.

    `kwargs` overrides all other arguments of `swanlab.init`, and may use ROLL's names. `login_kwargs` are passed to
    `swanlab.login`, which is not called offline. Raises MissingExtraError without the library, BackendError if it
    cannot start.
    """

    def __init__(self, run: TrackedRun, *, login_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        with requiring("swanlab", extra="swanlab", wanted_by="track.with"):
            import swanlab
        identity = run.identity()
        self._one_axis = run.one_axis
        self._defined: set[str] = set()
        arguments = {
            "project": identity.project,
            "workspace": identity.entity,
            "group": identity.group,
            "name": identity.name,
            "id": identity.run_id,
            "mode": None if identity.mode == "shared" else identity.mode,  # a mode of wandb only
            "log_dir": str(run.log_dir or run.folder / "swanlab"),
            "config": identity.config,
            "resume": "allow",
            "reinit": True,
        }
        with starting("swanlab", way_out=WAY_OUT), _isolated_startup():
            login = {**({"api_key": identity.api_key} if identity.api_key else {}), **(login_kwargs or {})}
            if login and not is_offline("swanlab", kwargs.get("mode") or identity.mode):
                swanlab.login(**{"relogin": True, **login})
            kwargs = {NAMES.get(name, name): value for name, value in kwargs.items()}
            settings = kwargs.pop("settings", {})
            # The console belongs to the user and is not recorded.
            settings = {**settings, "terminal": {"proxy_type": "none", **settings.get("terminal", {})}}
            init_kwargs = {**arguments, **kwargs, "settings": swanlab.Settings(**settings)}
            self._run = swanlab.init(**init_kwargs)
            # The service rejects steps that it already has. The file of a killed process may lack the last ones.
            files = Path(init_kwargs["log_dir"]).glob(f"run-*/run-{init_kwargs['id']}.swanlab")
            history: History | None = History()
            if run.resumed and self._run.mode != "online":
                points = (point for file in files for point in _points(file))
                history = History.read("swanlab", lambda: points, by_axis=False)
            self.skips_held, self.keeps_lines = history is not None, history is None
            self._history = history or History()

    @staticmethod
    def accepted_arguments() -> Accepted:
        """Return the arguments of `swanlab.init`, which ignores others, under old and new names, and `login_kwargs`."""
        import swanlab

        tables = {"login_kwargs": parameters(swanlab.login), "settings": fields(swanlab.Settings)}
        return parameters(swanlab.init) | dict.fromkeys(NAMES) | tables

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        metrics = self._history.missing(metrics, step)
        if not metrics:
            return
        for name in metrics.keys() - self._defined:
            axis = "train/step" if self._one_axis else axis_of(name)
            # SwanLab keeps one value per position of a custom axis, which does not suit per-step metrics of a round.
            if axis in metrics and axis != name and not name.startswith("perf/"):
                self._run.define_metric(name, x_axis=axis)
            self._defined.add(name)
        self._run.log({"train/step": step, **metrics}, step=step)

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        from swanlab import echarts

        if self._history.has(name, step):
            return
        columns = list(rows[0])
        table = echarts.Table().add(columns, [[row[column] for column in columns] for row in rows])
        self._run.log({name: table}, step=step)

    def flush(self) -> None:
        """Write data that SwanLab 0.10 holds back to the run's file: half a second of lines, then the file's buffer."""
        time.sleep(HELD_BACK_S)
        store = getattr(getattr(self._run, "_core", None), "_store", None)
        if store is not None:
            store.ensure_flushed()

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


def _points(file: Path) -> Iterator[Point]:
    """Yield the points of a SwanLab file, which has no axes."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    for data in log_records(file):
        record = Record.FromString(data)
        for point in (record.scalar, record.media):
            if point.key:
                yield point.key, point.step, None


@contextmanager
def _isolated_startup() -> Iterator[None]:
    """Redirect SwanLab's output to stderr, and restore the Ctrl-C handler and excepthook that it replaces.

    SwanLab 0.10 ends its experiment at the first Ctrl-C, but a run first finishes its round and reports it.
    """
    hook = sys.excepthook
    ours = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.excepthook = hook
        if ours:
            signal.signal(signal.SIGINT, handler)
