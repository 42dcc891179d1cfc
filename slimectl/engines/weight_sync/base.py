"""Base classes of weight sync: one push at a time, another after restarts, and weights cast and split into messages.

Each transport to servers has its own file. The engine in this process receives weights without a transport.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from slimectl.errors import BackendError, SlimectlError
from slimectl.protocols import (
    INCOMPLETE,
    Adapter,
    AdapterPolicy,
    NamedTensors,
    Policy,
    WeightReceiver,
    WeightSync,
    WeightUpdateClient,
)
from slimectl.system.liveness import note_progress
from slimectl.system.stdio import logger
from slimectl.system.timeline import timeline
from slimectl.types import Metrics

if TYPE_CHECKING:
    from slimectl.engines.supervisor.server_pool import ServerPool

Message = list[tuple[str, Tensor]]

KEEP_FLOAT32 = ("e_score_correction_bias", "weight_scale_inv", "weight_scale")
"""Suffixes of tensors that stay in float32: a router's bias, whose rounding matters, and scales of fp8."""


class Recoded(Protocol):
    """A recoding, with the precision of the tensors that it does not change."""

    dtype: torch.dtype

    def __call__(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]: ...


Precision = torch.dtype | Recoded | None
"""The engines' precision: a dtype, a quantization, or None to keep each tensor's dtype."""


def targets(tensors: NamedTensors, precision: Precision) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Yield every tensor, recoded if the precision is a quantization, and the dtype that `cast` gives it."""
    if precision is None or isinstance(precision, torch.dtype):
        dtype = precision
    else:
        dtype, tensors = precision.dtype, precision(tensors)
    for name, tensor in tensors:
        note_progress()
        is_cast = tensor.is_floating_point() and tensor.element_size() > 1 and not name.endswith(KEEP_FLOAT32)
        yield name, tensor.detach(), dtype if dtype is not None and is_cast else tensor.dtype


def cast(tensors: NamedTensors, precision: Precision) -> Iterator[tuple[str, Tensor]]:
    """Cast floating tensors to the engine's precision, where the engine would round them anyway.

    A router's bias, fp8 tensors and fp8 scales keep theirs.
    """
    for name, tensor, dtype in targets(tensors, precision):
        yield name, tensor.to(dtype)


def buckets(tensors: NamedTensors, most_bytes: int) -> Iterator[tuple[Message, bool]]:
    """Group consecutive tensors into messages of at most `most_bytes`. Yields each, and whether it is the last.

    A larger tensor is a separate message.
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
    """Exhaust the stream on exit, even after an error. Other ranks take part in each tensor and would wait forever."""
    stream = iter(tensors)
    try:
        yield stream
    finally:
        for _ in stream:
            pass


def in_progress_version(version: str, *, last: bool) -> str:
    """Return the version to load a message under. Engines of an interrupted push must not appear complete."""
    return version if last else version + INCOMPLETE


LEAVE_S = 10.0
"""Seconds that engines get to resume after a failed push. The engines that caused it may not answer at all."""


@dataclass(eq=False)
class WeightSyncBase:
    """protocols.WeightSync to servers, one push at a time. A transport implements `_push`.

    `dtype` is the engines' precision. A push reports the "bytes" that were sent and the "pause_time" of the engines in
    seconds. It raises BackendError if an engine refuses or is gone. The others continue. Push again, or end: an engine
    with an interrupted push has an incomplete weight version.
    """

    policy: Policy
    workers: WeightUpdateClient
    _: KW_ONLY
    pause_mode: str = "in_place"
    dtype: Precision = None
    lock: Any = field(default_factory=RLock, init=False, repr=False)

    def push(self) -> Metrics:
        return self.push_to(self.workers)

    def push_to(self, workers: WeightUpdateClient) -> Metrics:
        """Push to these workers, engines that were restarted. Thread-safe if the policy runs one call at a time."""
        with self.lock:
            # The workers of this push stay the same, even if others are announced in the meantime.
            workers = copy.copy(workers)
            while True:
                version = self.policy.weight_version
                metrics = self._push(workers, version)
                # The policy may have made a step after its version was read and before its weights were.
                if self.policy.weight_version == version:
                    return metrics

    def _push(self, workers: WeightUpdateClient, version: str) -> Metrics:
        raise NotImplementedError

    def sleep(self) -> None:
        self.workers.sleep()

    def wake(self) -> None:
        self.workers.wake()

    def close(self) -> None:
        """Remove files, process groups and shared memory."""

    @contextmanager
    def paused(self, workers: WeightUpdateClient) -> Iterator[Stopwatch]:
        """Pause sampling within the block. Afterwards the engines continue, even if it failed or was interrupted."""
        watch = Stopwatch()
        with timeline.block("weights", "pause"):
            workers.begin(mode=self.pause_mode)
        try:
            with timeline.block("weights", "transfer"):
                yield watch
        except BaseException:
            with suppress(SlimectlError):
                workers.end(within_s=LEAVE_S)
            raise
        with timeline.block("weights", "resume"):
            workers.end()
        watch.stop()


@dataclass(eq=False)
class MessageSync(WeightSyncBase):
    """Pushes messages of at most `buffer_bytes`, cast to `dtype`.

    With `adapters` a push has only the policy's adapter, in float32, which the engines merge into its base model.
    """

    buffer_bytes: int = 512 * 2**20
    adapters: bool = False

    def _push_by(self, send: Callable[..., int], workers: WeightUpdateClient) -> Metrics:
        """Call `send` with the tensors, in the process that has them. It returns the number of bytes it sent."""
        with self.paused(workers) as watch:
            if self.adapters:
                adapted: AdapterPolicy = self.policy  # type: ignore[assignment]
                send = partial(_send_adapter, send=partial(send, dtype=None))
                sent = adapted.consume_adapter(self._consumer(send, workers))
            else:
                sent = self.policy.consume_weights(self._consumer(partial(send, dtype=self.dtype), workers))
        return {"bytes": float(sent), "pause_time": watch.seconds}

    def _consumer(self, send: Callable[..., int], workers: WeightUpdateClient) -> Callable[[Any], int]:
        """Return what sends weights or an adapter to these workers, on the ranks that do so."""
        return partial(send, workers=workers)


def _send_adapter(adapter: Adapter, *, send: Callable[..., int], workers: WeightUpdateClient) -> int:
    workers.expect_adapter(adapter)
    return send(adapter.tensors, workers=workers)


class Stopwatch:
    """Measures the seconds from its creation to `stop`."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.seconds = 0.0

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self._started


class InProcessSync(WeightSync):
    """Pushes into one engine of this process, which keeps its memory and leaves nothing to remove."""

    def __init__(self, policy: Policy, engine: WeightReceiver) -> None:
        self.policy = policy
        self.engine = engine

    def push(self) -> Metrics:
        """Load the weights into the engine, which samples nothing meanwhile. Reports the bytes that it read."""
        sizes: list[int] = []

        def counted_weights() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.policy.weights():
                sizes.append(tensor.nbytes)
                yield name, tensor

        started = time.perf_counter()
        self.engine.load_weights(counted_weights(), version=self.policy.weight_version)
        timeline.record("weights", "transfer", started)
        return {"bytes": float(sum(sizes)), "pause_time": time.perf_counter() - started}


class WeightSynchronizer:
    """Pushes with `sync`, again after restarts in `pool`, and tracks the version that the engines have.

    `asleep` is whether the engines sleep. The first push needs them awake.
    """

    def __init__(
        self, sync: WeightSync, policy: Policy, *, pool: ServerPool | None = None, asleep: bool = False
    ) -> None:
        self.version: str | None = None
        self.asleep = asleep
        self._sync, self._policy, self._pool = sync, policy, pool

    def push(self) -> Metrics:
        """Push the policy's weights to every engine. An engine that dies meanwhile is restarted first.

        Raises BackendError if engines refuse the weights, or the restart limit is reached.
        """
        while True:
            losses = self._pool.losses if self._pool else 0
            try:
                with self._pool.pause_watch() if self._pool else nullcontext():
                    metrics = self._sync.push()
                    self.version = self._policy.weight_version
                    if self._pool is not None:
                        self._pool.note_push(self.version)
                    described = ", ".join(f"{name} {value:g}" for name, value in metrics.items())
                    logger.debug(f"engines have weights {self.version}: {described}")
                    return metrics
            except BackendError:
                if self._pool is None:
                    raise
                self._pool.settle()
                if self._pool.losses == losses:
                    raise  # all engines are alive: a restart would not help

    def sleep(self) -> None:
        """Release the engines' memory, unless they sleep."""
        if self.asleep:
            return
        if self._pool is not None:
            self._pool.rest(True)
        self._sync.sleep()
        self.asleep = True

    def wake(self) -> None:
        """Allocate the memory of sleeping engines again. Their weights are invalid until the next push.

        One that died meanwhile is restarted by that push.
        """
        if not self.asleep:
            return
        self.asleep, self.version = False, None
        try:
            self._sync.wake()
        except BackendError:
            if self._pool is None:
                raise
        finally:
            if self._pool is not None:
                self._pool.rest(False)

    def close(self) -> None:
        with suppress(BackendError):  # the transport fails if its policy has died
            self._sync.close()
