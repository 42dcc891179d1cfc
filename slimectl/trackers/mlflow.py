"""MLflow tracker."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimectl.data.metrics_catalogue import axis_of
from slimectl.errors import requiring
from slimectl.trackers.base import Identity, TrackedRun, starting
from slimectl.types import TableRow

WAY_OUT = "Set MLFLOW_TRACKING_URI (or track.kwargs.mlflow.tracking_uri) to a server that answers, or drop mlflow"
RUN_TAG = "slimectl.run_id"
MAX_METRICS, MAX_PARAMS = 1000, 100
"""Limits of one call of log_batch."""
MAX_PARAM_CHARACTERS = 6000
REFUSED = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow does not allow in names, such as @ in pass@8."""


class MlflowTracker:
    """One MLflow run: at `tracking_uri` or MLFLOW_TRACKING_URI, else in a database in the run's folder `mlflow`.

    The step of a metric is its own axis, or with `one_axis` the train step. Settings are parameters, and tables of
    strings are artifacts. `experiment_name` defaults to the project. `run_name` and `tags` are passed to MLflow.
    Raises MissingExtraError without the library, BackendError if it cannot start.
    """

    skips_held = True

    def __init__(
        self,
        run: TrackedRun,
        *,
        tracking_uri: str | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        with requiring("mlflow", extra="mlflow", wanted_by="track.with"):
            from mlflow.tracking import MlflowClient
        identity = run.identity()
        if identity.api_key:
            os.environ["MLFLOW_TRACKING_TOKEN"] = identity.api_key  # MLflow 3 only reads it there, at every request
        self._one_axis = run.one_axis
        self._axes: dict[str, float] = {"rollout/step": float(run.rounds_done)} if run.rounds_done else {}
        with starting("mlflow", way_out=WAY_OUT):
            folder = run.log_dir or run.folder / "mlflow"
            address = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
            self._client = MlflowClient(tracking_uri=address or _local_database(folder))
            experiment = self._experiment(
                experiment_name or identity.project, None if address else folder / "artifacts"
            )
            self._run_id = self._find_run(experiment, identity.run_id) or self._create_run(
                experiment, identity, name=run_name or identity.name, tags=tags or {}
            )
            self._client.update_run(self._run_id, status="RUNNING")
            latest = self._client.get_run(self._run_id).data._metric_objs if run.resumed else []
            self._latest = {metric.key: int(metric.step) for metric in latest}
            """Step of the last point that MLflow has of every metric. No earlier point is missing."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        from mlflow.entities import Metric

        self._axes |= {name: value for name, value in metrics.items() if name.endswith("/step")}
        now = int(time.time() * 1000)
        values = [
            Metric(REFUSED.sub("_at_", name), value, now, self._step_of(name, step)) for name, value in metrics.items()
        ]
        values = [value for value in values if value.step > self._latest.get(value.key, value.step - 1)]
        for batch in _batches(values, MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=batch)

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Write a table as JSON that MLflow's page shows as a table."""
        columns = list(rows[0])
        table = {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
        self._client.log_text(self._run_id, json.dumps(table), f"{REFUSED.sub('_at_', name)}/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _step_of(self, name: str, step: int) -> int:
        return step if self._one_axis else int(self._axes.get(axis_of(name), step))

    def _experiment(self, name: str, artifacts: Path | None) -> str:
        """Return the identifier of an experiment. Create it if it does not exist."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        location = None if artifacts is None else artifacts.resolve().as_uri()
        return str(self._client.create_experiment(name, artifact_location=location))

    def _find_run(self, experiment: str, run_id: str) -> str | None:
        """Return MLflow's identifier of the run, if it was started before."""
        runs = self._client.search_runs([experiment], filter_string=f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _create_run(self, experiment: str, identity: Identity, *, name: str | None, tags: Mapping[str, str]) -> str:
        """Create a run with the settings as its parameters, and return MLflow's identifier."""
        from mlflow.entities import Param

        labels = {**tags, RUN_TAG: identity.run_id, **({"group": identity.group} if identity.group else {})}
        run_id = str(self._client.create_run(experiment, run_name=name, tags=labels).info.run_id)
        params = [Param(key, text[:MAX_PARAM_CHARACTERS]) for key, text in _flat(identity.config or {})]
        for batch in _batches(params, MAX_PARAMS):
            self._client.log_batch(run_id, params=batch)
        return run_id


def _local_database(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{(folder / 'mlflow.db').resolve()}"


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings by dotted key, as strings."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield REFUSED.sub("_", f"{prefix}{key}"), str(value)


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
