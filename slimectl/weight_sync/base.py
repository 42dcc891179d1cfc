"""Operations of all transports on a stream of weights: cast it, split it into messages, read it to its end."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import RLock

import torch
from torch import Tensor

from slimectl.errors import SlimectlError
from slimectl.protocols import INCOMPLETE, NamedTensors, Policy, WeightUpdateClient
from slimectl.types import Metrics

Message = list[tuple[str, Tensor]]

KEEP_FLOAT32 = "e_score_correction_bias"
"""Suffix of tensors that stay in float32: a router's bias is small beside its effect, every engine keeps it exact."""


def cast(tensors: NamedTensors, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Cast floating tensors to the engine's precision (None: unchanged), where the engine would round them anyway."""
    for name, tensor in tensors:
        is_cast = tensor.is_floating_point() and tensor.element_size() > 1 and not name.endswith(KEEP_FLOAT32)
        yield name, tensor.detach().to(dtype) if dtype is not None and is_cast else tensor.detach()


def buckets(tensors: NamedTensors, most_bytes: int) -> Iterator[tuple[Message, bool]]:
    """Group consecutive tensors into messages of at most `most_bytes`; yields each and whether it is the last.

    A larger tensor is a message by itself.
    """
    message: Message = []
    size = 0
    for name, tensor in tensors:
        if message and size + tensor.nbytes > most_bytes:
            yield message, False
            message, size = [], 0
        message.append((name, tensor))
        size += tensor.nbytes
    if message:
        yield message, True


@contextmanager
def drained(tensors: NamedTensors) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Exhaust the stream on exit, even after an error: other ranks take part in each tensor and would wait for ever."""
    stream = iter(tensors)
    try:
        yield stream
    finally:
        for _ in stream:
            pass


def in_progress_version(version: str, *, last: bool) -> str:
    """Return the version to load a message under: engines of an interrupted push must not pass for complete."""
    return version if last else version + INCOMPLETE


LEAVE_S = 10.0
"""Seconds that engines get to continue after a failed push: those that caused it may not answer at all."""


class WeightSyncBase:
    """Pushes weights, one push at a time, to all workers or to some; a transport implements `_push`.

    A push reports "bytes" that were sent and the "pause_time" of the engines in seconds. It raises BackendError if an
    engine refuses or is gone; the others continue. Push again, or end: an engine with an interrupted push has an
    incomplete weight version.
    """

    def __init__(self, policy: Policy, workers: WeightUpdateClient, *, pause_mode: str = "in_place") -> None:
        self.policy = policy
        self.workers = workers
        self.pause_mode = pause_mode
        self.lock = RLock()

    def push(self) -> Metrics:
        return self.push_to(self.workers)

    def push_to(self, workers: WeightUpdateClient) -> Metrics:
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

    def _push(self, workers: WeightUpdateClient, version: str) -> Metrics:
        raise NotImplementedError

    def close(self) -> None:
        """Remove files, process groups and shared memory."""

    @contextmanager
    def paused(self, workers: WeightUpdateClient) -> Iterator[Stopwatch]:
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
