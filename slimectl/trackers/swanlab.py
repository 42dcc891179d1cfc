"""SwanLab tracker."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from slimectl.data.metrics_catalogue import axis_of
from slimectl.errors import MissingExtraError
from slimectl.trackers.base import TrackedRun, starting
from slimectl.types import TableRow

WAY_OUT = 'set SWANLAB_API_KEY (or run `swanlab login`), or track.mode = "offline", or drop swanlab from track.with'


class SwanlabTracker:
    """One SwanLab experiment, in a folder `swanlab`; each metric on its own axis, or with `one_axis` on the train step.

    `kwargs` overrides all other arguments of `swanlab.init`. Raises MissingExtraError without the library, BackendError
    if it cannot start.
    """

    def __init__(self, run: TrackedRun, **kwargs: Any) -> None:
        try:
            import swanlab
        except ImportError as error:
            raise MissingExtraError("swanlab", extra="swanlab", wanted_by="track.with") from error
        identity = run.identity()
        self._one_axis = run.one_axis
        self._defined: set[str] = set()
        arguments = {
            "project": identity.project,
            "workspace": identity.entity,
            "group": identity.group,
            "name": identity.name,
            "id": identity.run_id,
            "mode": identity.mode,
            "log_dir": str(run.log_dir or run.folder / "swanlab"),
            "config": identity.config,
            "resume": "allow",
            "reinit": True,
        }
        with starting("swanlab", way_out=WAY_OUT), _isolated_startup():
            # The console belongs to the user and is not recorded.
            init_kwargs = {"settings": swanlab.Settings(terminal={"proxy_type": "none"}), **arguments, **kwargs}
            self._run = swanlab.init(**init_kwargs)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if not metrics:
            return
        for name in metrics.keys() - self._defined:
            axis = "train/step" if self._one_axis else axis_of(name)
            # SwanLab keeps one value per position of a custom axis: unfit for metrics of each step of a round.
            if axis in metrics and axis != name and not name.startswith("perf/"):
                self._run.define_metric(name, x_axis=axis)
            self._defined.add(name)
        self._run.log({"train/step": step, **metrics}, step=step)

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        import swanlab

        self._run.log({name: [swanlab.Text("\n".join(f"{key}: {row[key]}" for key in row)) for row in rows]}, step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


@contextmanager
def _isolated_startup() -> Iterator[None]:
    """Redirect SwanLab's output to stderr, and restore the Ctrl-C handler and excepthook that it replaces.

    SwanLab 0.10 ends its experiment at the first Ctrl-C; a run finishes its round first and reports it.
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
