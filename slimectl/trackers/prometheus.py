"""Prometheus tracker: serves the latest metrics over HTTP."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from slimectl.errors import BackendError, requiring
from slimectl.system.stdio import logger
from slimectl.trackers.base import TrackedRun, first_line
from slimectl.types import TableRow

if TYPE_CHECKING:
    from prometheus_client import Gauge

PREFIX = "slimectl_"


class PrometheusTracker:
    """The last value of every metric at http://HOST:PORT/metrics, as a gauge with the run's name in the label `run`.

    Prometheus names are metric names prefixed with `slimectl_`, with an underscore for every character that Prometheus
    rejects. The help text has the original name. Port 0 chooses any free port, which is logged.

    Raises MissingExtraError without the library, BackendError for an address that cannot be opened.
    """

    def __init__(self, run: TrackedRun, *, host: str, port: int) -> None:
        with requiring("prometheus_client", extra="prometheus", wanted_by="track.prometheus_port"):
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        self._run_name = run.folder.name
        self._registry = CollectorRegistry()  # without the library's own process metrics
        self._new_gauge = partial(Gauge, labelnames=["run"], registry=self._registry)
        self._gauges: dict[str, Gauge] = {}
        self._names: dict[str, str] = {}
        """Metric by its Prometheus name."""
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            raise _not_opened(host, port, error) from error
        logger.info(f"metrics for Prometheus at http://{host}:{self._server.server_port}/metrics")

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Set the gauges, then raise ValueError if metrics share a Prometheus name."""
        hidden = []
        for name, value in {"train/step": step, **metrics}.items():
            shown = self._names.setdefault(prometheus_name(name), name)
            if shown == name:
                self._gauge(name).labels(self._run_name).set(value)
            else:
                hidden.append(f"{name} has the same Prometheus name as {shown}")
        if hidden:
            raise ValueError("; ".join(hidden))

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = self._new_gauge(prometheus_name(name), name)
        return self._gauges[name]

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Do nothing: Prometheus only has numbers."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def check_address(host: str, port: int) -> None:
    """Raise BackendError for an address that cannot be opened now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as endpoint:
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            endpoint.bind(address)
    except OSError as error:
        raise _not_opened(host, port, error) from error


def _not_opened(host: str, port: int, error: OSError) -> BackendError:
    reason = error.strerror or first_line(error)
    return BackendError(
        f"track.prometheus_port: {host}:{port} cannot be opened: {reason}. Set another port, or 0 for any free one."
    )


def prometheus_name(name: str) -> str:
    """Return the Prometheus name of a metric.

    >>> prometheus_name("eval/gsm8k-pass@8")
    'slimectl_eval_gsm8k_pass_at_8'
    """
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name.replace("@", "_at_"))
