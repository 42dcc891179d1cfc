"""Weights & Biases tracker."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slimectl.data.metrics_catalogue import axis_of
from slimectl.errors import requiring
from slimectl.system.stdio import logger
from slimectl.trackers.arguments import Accepted, fields, parameters
from slimectl.trackers.base import Identity, TrackedRun, first_line, is_offline, starting
from slimectl.trackers.history import History, log_records, points_of
from slimectl.types import TableRow

WAY_OUT = 'Set WANDB_API_KEY (or run `wandb login`), or track.mode = "offline", or drop wandb from track.with'

WRITES_EVERY_S = 0.25
"""Longest time in seconds that wandb holds data back before it writes to its file."""


class WandbTracker:
    """One wandb run, in a folder `wandb`. Each metric has its own axis by define_metric, or with `one_axis` the step.

    It is the global run that `wandb.log` in a hook uses, unless the program already has its own. `kwargs` overrides
    all other arguments of `wandb.init`. ROLL's `log_dir` is `dir`. Raises MissingExtraError without the library,
    BackendError if it cannot start.
    """

    def __init__(self, run: TrackedRun, **kwargs: Any) -> None:
        with requiring("wandb", extra="wandb", wanted_by="track.with"):
            import wandb
        folder, identity = run.log_dir or run.folder, run.identity()
        if "log_dir" in kwargs:  # ROLL's name
            kwargs["dir"] = kwargs.pop("log_dir")
        if is_offline("wandb", kwargs.get("mode") or identity.mode):
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb 0.31 sends telemetry even offline
        self._one_axis = run.one_axis
        self._defined: set[str] = set()
        settings = {**_defaults(identity), **kwargs.pop("settings", {})}
        if identity.mode == "shared":
            settings = {"x_label": "driver", "x_primary": True, **settings}
        arguments: dict[str, Any] = {
            "project": identity.project,
            "entity": identity.entity,
            "group": identity.group,
            "name": identity.name,
            "id": identity.run_id,
            "mode": identity.mode,
            "dir": str(folder.resolve()),
            "config": identity.config,
            "resume": "allow",
            "reinit": "default" if wandb.run is None else "create_new",
        }
        if "x_transaction_log_flush_interval" in wandb.Settings.model_fields:
            # wandb 0.31 holds back 15 s, which a killed process loses.
            settings = {"x_transaction_log_flush_interval": WRITES_EVERY_S, **settings}
        self._written_s = settings.get("x_transaction_log_flush_interval", 0.0)
        arguments |= kwargs
        with starting("wandb", way_out=WAY_OUT):
            folder.mkdir(parents=True, exist_ok=True)  # else wandb silently writes to /tmp
            files = list(Path(arguments["dir"]).glob(f"wandb/*run-*/run-{arguments['id']}.wandb"))
            history = None
            if run.resumed and files:  # only wandb knows the points of another folder
                history = History.read("wandb", lambda: points_of(row for file in files for row in _rows(file)))
            self.skips_held, self.keeps_lines = history is not None, history is None
            self._history = history or History()
            self._run = wandb.init(**arguments, settings=settings)

    @staticmethod
    def accepted_arguments() -> Accepted:
        """Return the arguments of `wandb.init`."""
        import wandb

        return parameters(wandb.init) | {"settings": fields(wandb.Settings), "log_dir": None}

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        metrics = self._history.missing(metrics, step)
        if not metrics:
            return
        for name in metrics.keys() - self._defined:
            axis = "train/step" if self._one_axis else axis_of(name)
            self._run.define_metric(name, step_metric=axis if axis != name else None)
            self._defined.add(name)
        self._run.log({"train/step": step, **metrics})

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        import wandb

        if self._history.has(name, step):
            return
        axis = "train/step" if self._one_axis else axis_of(name)
        columns = list(rows[0])
        table = wandb.Table([*columns], [[row[key] for key in columns] for row in rows])
        self._run.log({name: table, axis: step})

    def histogram(self, name: str, values: Sequence[float], *, step: int) -> None:
        import wandb

        if not self._history.has(name, step):
            axis = "train/step" if self._one_axis else axis_of(name)
            self._run.log({name: wandb.Histogram(values), axis: step})

    def flush(self) -> None:
        """Wait until wandb has written everything that it received to its file."""
        time.sleep(self._written_s)

    def close(self) -> None:
        self._run.finish()


@contextmanager
def joined_run(identity: Identity, folder: Path, label: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Write into the run of another process, which started it in wandb's shared mode, while the context is open.

    Metrics of this machine are under the label. In this process it is the global run that `wandb.log` in a user's
    function uses. A process that cannot join logs a warning and continues.
    """
    import wandb

    run = None
    # The driver's wandb service, which wandb puts into the environment, accepts one process per run.
    os.environ.pop("WANDB_SERVICE", None)
    run_settings = {
        **_defaults(identity),
        **settings,
        "x_label": label,
        "x_primary": False,
        "x_update_finish_state": False,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=identity.project,
            entity=identity.entity,
            id=identity.run_id,
            mode="shared",
            dir=str(folder.resolve()),
            settings=run_settings,
        )
    except Exception as error:  # any error, because a chart must not stop a run
        logger.warning(f"track.mode: {label} cannot join the run at wandb: {first_line(error)}. Training continues.")
    try:
        yield
    finally:
        if run is not None:
            run.finish()


def _defaults(identity: Identity) -> dict[str, Any]:
    """Return the settings of every process. wandb neither records nor uses the console, which belongs to the user."""
    access = {"base_url": identity.host, "api_key": identity.api_key}
    return {"console": "off", "silent": True, **{name: value for name, value in access.items() if value}}


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a wandb file. A table is at the position of its own axis."""
    from wandb.proto import wandb_internal_pb2

    protocol: Any = wandb_internal_pb2  # untyped

    for data in log_records(file):
        items = {tuple(item.nested_key): item for item in protocol.Record.FromString(data).history.item}
        tables = [key[0] for key in items if key[1:] == ("_type",)]
        row = {key[0]: json.loads(item.value_json) for key, item in items.items() if len(key) == 1}
        for name in tables:
            yield {name: None, "train/step": row.get("train/step", row.get(axis_of(name)))}
        if not tables:
            yield row
