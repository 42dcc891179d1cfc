"""One policy in front of N rank processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.errors import SettingsError
from slimectl.policies.ranks import LocalRanks, portable
from slimectl.ports import Loss, Policy
from slimectl.types import Metrics, Row

if TYPE_CHECKING:
    from torch import Tensor


class GroupPolicy:
    """ports.Policy over `ranks` processes on this machine, gloo on CPU, nccl on GPUs.

    `build` is called in every rank, after it has joined the process group; it and the losses must be picklable. A
    rank's exception is raised here with its own type, its traceback as a note.
    """

    def __init__(self, build: Callable[[], Policy], *, ranks: int) -> None:
        if ranks < 1:
            raise SettingsError(f"ranks {ranks}: a policy needs at least one")
        self.weight_version = "0"
        self._streaming = False
        self._ranks = LocalRanks(_serve, build, ranks=ranks)
        try:
            self._finished()
        except BaseException:
            self._ranks.end(polite=False)
            raise

    def log_probs(self, rows: Sequence[Row]) -> list[list[float]]:
        return self._call("log_probs", rows)

    def forward_backward(self, rows: Sequence[Row], loss: Loss) -> Metrics:
        return self._call("forward_backward", rows, loss)

    def optim_step(self) -> Metrics:
        return self._call("optim_step")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """One tensor at a time crosses from rank 0; no other call until the iterator is exhausted or closed."""
        import torch

        self._request("weights")
        self._streaming = True
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
            self._streaming = False

    def save(self, path: Path) -> None:
        self._call("save", path)

    def load(self, path: Path) -> None:
        self._call("load", path)

    def close(self) -> None:
        """End every rank process."""
        self._ranks.end()

    def _call(self, method: str, *arguments: Any) -> Any:
        self._request(method, *arguments)
        return self._finished()

    def _request(self, method: str, *arguments: Any) -> None:
        if self._streaming:
            raise RuntimeError(f"{method}: the weights are still being read; exhaust or close that iterator first")
        self._ranks.send(method, *arguments)

    def _finished(self) -> Any:
        result, self.weight_version = list(self._ranks.answers())[-1]
        return result


def _serve(build: Callable[[], Policy], pipe: Connection) -> None:
    """Obey until the pipe closes. A method's exception is an answer; one of `build` ends the rank."""
    import torch.distributed as dist

    policy = build()
    rank = dist.get_rank()
    pipe.send(("done", (None, policy.weight_version)))
    while True:
        request = pipe.recv_bytes()
        try:
            result = _obey(policy, request, pipe, rank)
        except Exception as error:
            pipe.send(("error", portable(error, rank)))
        else:
            pipe.send(("done", (result if rank == 0 else None, policy.weight_version)))


def _obey(policy: Policy, request: bytes, pipe: Connection, rank: int) -> Any:
    import pickle

    import torch

    method, *arguments = pickle.loads(request)
    if method != "weights":
        return getattr(policy, method)(*arguments)
    for name, tensor in policy.weights():
        if rank == 0:
            # A scalar has no bytes to view; every tensor travels flat.
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            pipe.send(("part", (name, tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes())))
    return None
