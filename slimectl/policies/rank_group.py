"""Thread-safe policies that run one call at a time, in this process or on N rank processes."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.errors import SettingsError
from slimectl.protocols import Adapter, Executor, NamedTensors, Policy, RankConsumers, RankPipe, Sleeper
from slimectl.system.timeline import timeline
from slimectl.types import Loss, Metrics, TopTokens, TrainingSample

if TYPE_CHECKING:
    from torch import Tensor


def _locked(name: str) -> Any:
    """Return a method that holds the lock and calls the policy's method of this name."""

    def call(self: LockedPolicy, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return getattr(self._policy, name)(*args, **kwargs)

    return call


class LockedPolicy:
    """protocols.Policy with a lock, so that a restarted engine can read weights while training continues.

    `values`, `before_step`, `measure_pack`, `limit_packs`, `consume_adapter`, `reset_optimizer` and the saves in the
    background need a policy that has them.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lock = threading.RLock()

    @property
    def weight_version(self) -> str:
        return self._policy.weight_version

    log_probs = _locked("log_probs")
    top_log_probs = _locked("top_log_probs")
    values = _locked("values")
    forward_backward = _locked("forward_backward")
    before_step = _locked("before_step")
    measure_pack = _locked("measure_pack")
    limit_packs = _locked("limit_packs")
    optim_step = _locked("optim_step")
    consume_weights = _locked("consume_weights")
    consume_adapter = _locked("consume_adapter")
    reset_optimizer = _locked("reset_optimizer")
    save = _locked("save")
    save_in_background = _locked("save_in_background")
    is_saved = _locked("is_saved")
    load = _locked("load")
    close = _locked("close")

    def sleep(self, *, keep_weights: bool = False) -> None:
        """protocols.Sleeper.sleep, for a policy that implements it."""
        if isinstance(self._policy, Sleeper):
            with self._lock:
                self._policy.sleep(keep_weights=keep_weights)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights. Holds the lock until the iterator is exhausted or closed."""
        with self._lock:
            yield from self._policy.weights()


class DistributedPolicy:
    """protocols.Policy over `ranks` processes placed by `executor`: gloo on CPU, nccl on GPUs.

    `build` is called in every rank, after it has joined the process group. It and the losses must be picklable. An
    exception in a rank is raised here with its original type, and its traceback as a note. Thread-safe: one call runs
    at a time, and other threads wait.
    """

    def __init__(self, executor: Executor, build: Callable[[], Policy], *, ranks: int) -> None:
        if ranks < 1:
            raise SettingsError(f"ranks is {ranks}, but a policy needs at least one")
        self.weight_version = "0"
        self._lock = threading.Lock()
        self._reader_thread: int | None = None
        self._ranks = executor.group(_rank_main, build, ranks=ranks)
        try:
            self._await_result()
        except BaseException:
            self._ranks.end(polite=False)
            raise

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        log_probs: list[list[float]] = self._call("log_probs", rows)
        return log_probs

    def top_log_probs(self, rows: Sequence[TrainingSample], k: int) -> list[list[TopTokens]]:
        likeliest: list[list[TopTokens]] = self._call("top_log_probs", rows, k)
        return likeliest

    def forward_backward(self, rows: Sequence[TrainingSample], loss: Loss) -> Metrics:
        metrics: Metrics = self._call("forward_backward", rows, loss)
        return metrics

    def values(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        """protocols.Critic.values, if the ranks run a critic."""
        values: list[list[float]] = self._call("values", rows)
        return values

    def sleep(self, *, keep_weights: bool = False) -> None:
        """protocols.Sleeper.sleep, on ranks that implement it."""
        self._call("sleep", keep_weights)

    def before_step(self, rollout_id: int, step_id: int) -> None:
        """protocols.PreStepHook.before_step, if the ranks implement it."""
        self._call("before_step", rollout_id, step_id)

    def measure_pack(self, rows: Sequence[TrainingSample], loss: Loss, tokens: int) -> float | None:
        """protocols.PackProber.measure_pack, if the ranks implement it."""
        share: float | None = self._call("measure_pack", rows, loss, tokens)
        return share

    def limit_packs(self, tokens: int) -> None:
        """protocols.PackProber.limit_packs, if the ranks implement it."""
        self._call("limit_packs", tokens)

    def optim_step(self) -> Metrics:
        metrics: Metrics = self._call("optim_step")
        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream tensors from rank 0. Until the iterator ends or is closed, other calls wait or raise RuntimeError."""
        import torch

        self._acquire_lock("weights")
        self._reader_thread = threading.get_ident()
        try:
            self._ranks.send("weights")
            answers = self._ranks.answers()
            try:
                for answer in answers:
                    if len(answer) == 4:
                        name, dtype, shape, data = answer
                        yield name, torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
            finally:
                # A reader that stops early must not leave the ranks in the middle of their stream.
                for _ in answers:
                    pass
        finally:
            self._reader_thread = None
            self._lock.release()

    def consume_weights(self, consumer: Callable[[NamedTensors], Any]) -> Any:
        """Call `consumer(weights)` on rank 0, or protocols.RankConsumers on their ranks, and return a result.

        The consumers and the result must be picklable.
        """
        return self._call("consume_weights", consumer)

    def consume_adapter(self, consumer: Callable[[Adapter], Any]) -> Any:
        """protocols.AdapterPolicy.consume_adapter on rank 0, if the ranks train an adapter."""
        return self._call("consume_adapter", consumer)

    def save(self, path: Path) -> None:
        self._call("save", path)

    def save_in_background(self, path: Path) -> None:
        """protocols.BackgroundSaver.save_in_background, if the ranks implement it. Rank 0 writes."""
        self._call("save_in_background", path)

    def is_saved(self) -> bool:
        """protocols.BackgroundSaver.is_saved, if the ranks implement it."""
        return bool(self._call("is_saved"))

    def load(self, path: Path) -> None:
        self._call("load", path)

    def reset_optimizer(self) -> None:
        """protocols.ResettableOptimizer.reset_optimizer, if the ranks implement it."""
        self._call("reset_optimizer")

    def close(self) -> None:
        """Stop every rank process."""
        self._ranks.end()

    def on_ranks(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in every rank and return the results by rank. Everything must be picklable."""
        results: list[Any] = self._call("on_ranks", function, *arguments)
        return results

    def _call(self, method: str, *arguments: Any) -> Any:
        self._acquire_lock(method)
        try:
            self._ranks.send(method, *arguments)
            return self._await_result()
        finally:
            self._lock.release()

    def _acquire_lock(self, method: str) -> None:
        """Wait until other threads' calls end. Raises RuntimeError if this thread would wait for itself."""
        if self._reader_thread == threading.get_ident():
            raise RuntimeError(f"{method}: the weights are still being read. Exhaust or close that iterator first.")
        self._lock.acquire()

    def _await_result(self) -> Any:
        result, self.weight_version = list(self._ranks.answers())[-1]
        return result


def _rank_main(build: Callable[[], Policy], pipe: RankPipe) -> None:
    """Serve requests until the pipe closes. Method exceptions are sent back. An exception in `build` ends the rank."""
    import torch.distributed as dist

    policy = build()
    rank = dist.get_rank()
    timeline.start()
    pipe.done((None, policy.weight_version))
    while True:
        request = pipe.recv_bytes()
        try:
            result = _dispatch(policy, request, pipe, rank)
            pipe.done((result if rank == 0 else None, policy.weight_version))
        except Exception as error:
            pipe.failed(error)


def _dispatch(policy: Policy, request: bytes, pipe: RankPipe, rank: int) -> Any:
    """Return the result of a request. The timeline gets its time, and on a CPU the time of this process's own work."""
    import torch

    method, *arguments = pickle.loads(request)
    if method == "on_ranks":
        return _gather(arguments[0], arguments[1:])
    started, cpu_s = time.perf_counter(), time.process_time()
    try:
        return _result(policy, method, arguments, pipe, rank)
    finally:
        # A process that waits for a GPU may spin, so its CPU time says nothing.
        busy = {} if torch.cuda.is_available() else {"busy": round(time.process_time() - cpu_s, 6)}
        timeline.record(f"rank/{rank}", method, started, **busy)


def _result(policy: Policy, method: str, arguments: Sequence[Any], pipe: RankPipe, rank: int) -> Any:
    import torch

    if method == "consume_weights":
        weights = policy.weights()
        return _consume_on_ranks(weights, weights, arguments[0], rank)
    if method == "consume_adapter":
        adapter: Adapter = policy.adapter()  # type: ignore[attr-defined]
        return _consume_on_ranks(adapter.tensors, adapter, arguments[0], rank)
    if method == "sleep":
        return policy.sleep(keep_weights=arguments[0]) if isinstance(policy, Sleeper) else None
    if method != "weights":
        return getattr(policy, method)(*arguments)
    for name, tensor in policy.weights():
        if rank == 0:
            # A scalar has no bytes to view, so every tensor is sent flat.
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            pipe.part((name, tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()))
    return None


def _gather(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """Call a function, and return the results of all ranks. An error of any rank is raised on every rank."""
    import torch.distributed as dist

    try:
        answer: tuple[Any, Exception | None] = function(*arguments), None
    except Exception as error:  # the other ranks wait for this one
        answer = None, error
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    for _, failure in answers:
        if failure is not None:
            raise failure
    return [result for result, _ in answers]


def _consume_on_ranks(tensors: NamedTensors, argument: Any, consumer: Callable[[Any], Any], rank: int) -> Any:
    """Call RankConsumers on their ranks, and any other consumer on rank 0."""
    if not isinstance(consumer, RankConsumers):
        return _consume(tensors, argument, consumer if rank == 0 else None)
    results = _gather(_consume, (tensors, argument, consumer.by_rank.get(rank)))
    return next(result for result in results if result is not None)


def _consume(tensors: NamedTensors, argument: Any, consumer: Callable[[Any], Any] | None) -> Any:
    """Call the consumer of this rank, if any. Every rank iterates over all tensors: gathering one is collective."""
    try:
        return None if consumer is None else consumer(argument)
    finally:
        for _ in tensors:
            pass
