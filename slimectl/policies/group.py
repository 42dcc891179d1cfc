"""One policy in front of N rank processes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slimectl.errors import SettingsError
from slimectl.ports import Executor, Loss, NamedTensors, Policy
from slimectl.types import Metrics, Row

if TYPE_CHECKING:
    from torch import Tensor


class RankPipe(Protocol):
    """A rank's end of what joins it to its driver."""

    def recv_bytes(self) -> bytes: ...

    def part(self, value: Any) -> None: ...

    def done(self, value: Any) -> None: ...

    def failed(self, error: BaseException) -> None: ...


class GroupPolicy:
    """ports.Policy over `ranks` processes, where `executor` puts them: gloo on CPU, nccl on GPUs.

    `build` is called in every rank, after it has joined the process group; it and the losses must be picklable. A
    rank's exception is raised here with its own type, its traceback as a note. Threads may share it: one call at a
    time, the others wait.
    """

    def __init__(self, executor: Executor, build: Callable[[], Policy], *, ranks: int) -> None:
        if ranks < 1:
            raise SettingsError(f"ranks {ranks}: a policy needs at least one")
        self.weight_version = "0"
        self._turn = threading.Lock()
        self._reader: int | None = None
        self._ranks = executor.group(_serve, build, ranks=ranks)
        try:
            self._finished()
        except BaseException:
            self._ranks.end(polite=False)
            raise

    def log_probs(self, rows: Sequence[Row]) -> list[list[float]]:
        return self._call("log_probs", rows)

    def forward_backward(self, rows: Sequence[Row], loss: Loss) -> Metrics:
        return self._call("forward_backward", rows, loss)

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        """ports.Critic's, where the ranks are a critic."""
        return self._call("values", rows)

    def before_step(self, rollout_id: int, step_id: int) -> None:
        """ports.Stepped's, where the ranks have it."""
        self._call("before_step", rollout_id, step_id)

    def optim_step(self) -> Metrics:
        return self._call("optim_step")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """One tensor at a time crosses from rank 0; no other call until the iterator is exhausted or closed."""
        import torch

        self._take_turn("weights")
        self._reader = threading.get_ident()
        try:
            self._ranks.send("weights")
            answers = self._ranks.answers()
            try:
                for answer in answers:
                    if len(answer) == 4:
                        name, dtype, shape, data = answer
                        yield name, torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
            finally:
                # A reader that leaves early must not leave the ranks in the middle of their stream.
                for _ in answers:
                    pass
        finally:
            self._reader = None
            self._turn.release()

    def hand_weights(self, to: Callable[[NamedTensors], Any]) -> Any:
        """`to(weights)` on rank 0; what it returns comes back, and must be picklable as `to` is."""
        return self._call("hand_weights", to)

    def save(self, path: Path) -> None:
        self._call("save", path)

    def load(self, path: Path) -> None:
        self._call("load", path)

    def close(self) -> None:
        """End every rank process."""
        self._ranks.end()

    def _call(self, method: str, *arguments: Any) -> Any:
        self._take_turn(method)
        try:
            self._ranks.send(method, *arguments)
            return self._finished()
        finally:
            self._turn.release()

    def _take_turn(self, method: str) -> None:
        """Wait for other threads' calls. Raises RuntimeError where this thread would wait for itself."""
        if self._reader == threading.get_ident():
            raise RuntimeError(f"{method}: the weights are still being read; exhaust or close that iterator first")
        self._turn.acquire()

    def _finished(self) -> Any:
        result, self.weight_version = list(self._ranks.answers())[-1]
        return result


def _serve(build: Callable[[], Policy], pipe: RankPipe) -> None:
    """Obey until the pipe closes. A method's exception is an answer; one of `build` ends the rank."""
    import torch.distributed as dist

    policy = build()
    rank = dist.get_rank()
    pipe.done((None, policy.weight_version))
    while True:
        request = pipe.recv_bytes()
        try:
            result = _obey(policy, request, pipe, rank)
            pipe.done((result if rank == 0 else None, policy.weight_version))
        except Exception as error:
            pipe.failed(error)


def _obey(policy: Policy, request: bytes, pipe: RankPipe, rank: int) -> Any:
    import torch

    method, *arguments = pickle.loads(request)
    if method == "hand_weights":
        return _hand_weights(policy, arguments[0], rank)
    if method != "weights":
        return getattr(policy, method)(*arguments)
    for name, tensor in policy.weights():
        if rank == 0:
            # A scalar has no bytes to view; every tensor travels flat.
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            pipe.part((name, tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()))
    return None


def _hand_weights(policy: Policy, to: Callable[[NamedTensors], Any], rank: int) -> Any:
    """Every rank goes through all of the weights, whatever `to` does: each tensor takes all to gather."""
    weights = policy.weights()
    try:
        return to(weights) if rank == 0 else None
    finally:
        for _ in weights:
            pass
