"""Base of weight sync to servers, for every transport: pause, load, continue."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import RLock

from slimectl.errors import SlimectlError
from slimectl.ports import Policy, WeightWorkers
from slimectl.types import Metrics

LEAVE_S = 10.0
"""Seconds that engines get to continue after a failed push: those that caused it may not answer at all."""


class ServerSync:
    """Pushes weights, one push at a time, to all workers or to some; a transport implements `_push`.

    A push reports "bytes" that were sent and the "pause_time" of the engines in seconds. It raises BackendError if an
    engine refuses or is gone; the others continue. Push again, or end: an engine with an interrupted push has an
    incomplete weight version.
    """

    def __init__(self, policy: Policy, workers: WeightWorkers, *, pause_mode: str = "in_place") -> None:
        self.policy = policy
        self.workers = workers
        self.pause_mode = pause_mode
        self.lock = RLock()

    def push(self) -> Metrics:
        return self.push_to(self.workers)

    def push_to(self, workers: WeightWorkers) -> Metrics:
        """Push to these workers, engines that were restarted. Thread-safe if the policy runs one call at a time."""
        with self.lock:
            # The workers of this push stay the same, even if others are announced meanwhile.
            workers = copy.copy(workers)
            while True:
                version = self.policy.weight_version
                metrics = self._push(workers, version)
                # The policy may have stepped between being asked for its version and for its weights.
                if self.policy.weight_version == version:
                    return metrics

    def _push(self, workers: WeightWorkers, version: str) -> Metrics:
        raise NotImplementedError

    def close(self) -> None:
        """Remove files, process groups and shared memory."""

    @contextmanager
    def paused(self, workers: WeightWorkers) -> Iterator[Stopwatch]:
        """Pause sampling within the block; afterwards the engines continue, even if it failed or was interrupted."""
        watch = Stopwatch()
        workers.begin(mode=self.pause_mode)
        try:
            yield watch
        except BaseException:
            with suppress(SlimectlError):
                workers.end(within_s=LEAVE_S)
            raise
        workers.end()
        watch.stop()


class Stopwatch:
    """Measures the seconds from its creation to `stop`."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.seconds = 0.0

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self._started
