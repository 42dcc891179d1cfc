"""Metrics that a user function sends by `log`. They become metrics of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from slimectl.types import Metrics

_collection: ContextVar[Metrics | None] = ContextVar("collection", default=None)


@contextmanager
def collected_metrics() -> Iterator[Metrics]:
    """Collect the metrics that are logged in the block. The returned dict fills up meanwhile."""
    metrics: Metrics = {}
    token = _collection.set(metrics)
    try:
        yield metrics
    finally:
        _collection.reset(token)


def collect(metrics: Metrics) -> bool:
    """Add metrics to the running collection. Returns False if there is none."""
    collection = _collection.get()
    if collection is not None:
        collection.update(metrics)
    return collection is not None
