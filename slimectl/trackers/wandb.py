"""Weights & Biases tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slimectl.data.metrics_catalogue import axis_of
from slimectl.errors import MissingExtraError
from slimectl.trackers.base import TrackedRun, starting
from slimectl.types import TableRow

WAY_OUT = 'set WANDB_API_KEY (or run `wandb login`), or track.mode = "offline", or drop wandb from track.with'


class WandbTracker:
    """One wandb run, in a folder `wandb`; each metric on its own axis by define_metric, or with `one_axis` on the step.

    `kwargs` overrides all other arguments of `wandb.init`. Raises MissingExtraError without the library, BackendError
    if it cannot start.
    """

    def __init__(self, run: TrackedRun, **kwargs: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("wandb", extra="wandb", wanted_by="track.with") from error
        folder, identity = run.log_dir or run.folder, run.identity()
        self._one_axis = run.one_axis
        self._defined: set[str] = set()
        # The console belongs to the user: wandb neither records it nor prints to it.
        defaults = {"console": "off", "silent": True, **({"base_url": identity.host} if identity.host else {})}
        settings = {**defaults, **kwargs.pop("settings", {})}
        arguments = {
            "project": identity.project,
            "entity": identity.entity,
            "group": identity.group,
            "name": identity.name,
            "id": identity.run_id,
            "mode": identity.mode,
            "dir": str(folder.resolve()),
            "config": identity.config,
            "resume": "allow",
            "reinit": "create_new",
        }
        with starting("wandb", way_out=WAY_OUT):
            folder.mkdir(parents=True, exist_ok=True)  # else wandb silently writes to /tmp
            self._run = wandb.init(**{**arguments, **kwargs}, settings=settings)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if not metrics:
            return
        for name in metrics.keys() - self._defined:
            axis = "train/step" if self._one_axis else axis_of(name)
            self._run.define_metric(name, step_metric=axis if axis != name else None)
            self._defined.add(name)
        self._run.log({"train/step": step, **metrics})

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        import wandb

        axis = "train/step" if self._one_axis else axis_of(name)
        columns = list(rows[0])
        table = wandb.Table([*columns], [[row[key] for key in columns] for row in rows])
        self._run.log({name: table, axis: step})

    def close(self) -> None:
        self._run.finish()
