"""The seams: what a stage asks of its parts. One contract suite per port runs against every adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slimectl.types import Completion, Metrics, Prompt, Row, Sample, SamplingParams, TableRow

if TYPE_CHECKING:
    from torch import Tensor, dtype

Item = TypeVar("Item")
Result = TypeVar("Result")
NamedTensors = Iterable[tuple[str, "Tensor"]]


class Engine(Protocol):
    """Samples text; many requests in flight at once."""

    async def generate(self, tokens: list[int], *, params: SamplingParams) -> Completion:
        """Continue `tokens`. Raises SettingsError if they leave no room in the context."""
        ...

    async def abort(self) -> None:
        """End every request in flight; each returns what it has, with finish "abort"."""
        ...

    async def close(self) -> None: ...


class WeightReceiver(Protocol):
    """An engine that takes new weights while it lives."""

    def load_weights(self, tensors: NamedTensors, *, version: str) -> None:
        """Replace weights in place by HF name. Raises CheckpointError on a missing, extra or misshapen tensor."""
        ...


class Loss(Protocol):
    """A pure function of one pack: the weighted sum to minimise and named weighted sums to report.

    Everything returned is a sum over tokens, weights applied: packs, micro-batches and ranks add up. A metric whose
    name ends in _max or _min is an extreme instead.
    """

    @property
    def needs_entropy(self) -> bool: ...

    def __call__(self, pack: TokenPack) -> tuple[Tensor, dict[str, Tensor]]: ...


class TokenPack(Protocol):
    """The response tokens of one pack, flat: each tensor is [T], float32; absent ones are None.

    `logprobs_T` (and `entropy_T`, where the loss asked for it, `predicted_T`, the values of a policy that is its own
    critic, and `logits_T` [T, vocabulary] for a loss whose `needs_logits` is true) carry gradients; `targets_T` are the
    tokens; all else is constant. `row_T` [T] int64 says which row of the pack a token belongs to, `rows` how many there
    are, `total_lengths` how many tokens each has, its prompt included.
    """

    logprobs_T: Tensor
    entropy_T: Tensor | None
    weights_T: Tensor
    advantages_T: Tensor | None
    old_logprobs_T: Tensor | None
    ref_logprobs_T: Tensor | None
    rollout_logprobs_T: Tensor | None
    values_T: Tensor | None
    returns_T: Tensor | None
    row_T: Tensor
    rows: int
    total_lengths: Sequence[int]
    predicted_T: Tensor | None
    logits_T: Tensor | None
    targets_T: Tensor | None


class Policy(Protocol):
    """Weights and their optimizer: one object whether it is one process or 512."""

    @property
    def weight_version(self) -> str:
        """ "0" before the first optimizer step, then the number of steps taken, resumes included."""
        ...

    def log_probs(self, rows: Sequence[Row]) -> list[list[float]]:
        """log p(token) of every response token at the rollout temperature, without gradients; R floats a row."""
        ...

    def forward_backward(self, rows: Sequence[Row], loss: Loss) -> Metrics:
        """Accumulate the gradient of `loss` over all rows (the whole global batch); the summed metrics, with "loss"."""
        ...

    def optim_step(self) -> Metrics:
        """Clip, step, advance the schedule, zero the gradients; "grad_norm" (before clipping) and "lr"."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor once, under its Hugging Face name, full (unsharded), in checkpoint order."""
        ...

    def hand_weights(self, to: Callable[[NamedTensors], Any]) -> Any:
        """`to(weights)` where the weights are: on rank 0 of many, without a copy in between. `to` must be picklable."""
        ...

    def save(self, path: Path) -> None:
        """Write weights (a loadable HF directory), optimizer, schedule and RNG into the empty folder `path`."""
        ...

    def load(self, path: Path) -> None:
        """Take all of it back, bit for bit, whatever number of ranks wrote it. Raises CheckpointError."""
        ...

    def close(self) -> None: ...


class LogProbs(Protocol):
    """What is only asked how likely given tokens are: a frozen policy, or a server that has one."""

    def log_probs(self, rows: Sequence[Row]) -> list[list[float]]:
        """As a policy's."""
        ...

    def close(self) -> None: ...


class Stepped(Protocol):
    """A policy that is told which optimizer step comes, for what its ranks do before it."""

    def before_step(self, rollout_id: int, step_id: int) -> None:
        """The `step_id`-th step (from 0) of round `rollout_id` comes next."""
        ...


class Critic(Protocol):
    """A model with one value per response token, and its optimizer; what it shares with Policy means the same."""

    @property
    def weight_version(self) -> str: ...

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        """The value of the state before every response token, without gradients; R floats a row."""
        ...

    def forward_backward(self, rows: Sequence[Row], loss: Loss) -> Metrics:
        """As a policy's; the loss finds values, with their gradient, where a policy's finds log-probabilities."""
        ...

    def optim_step(self) -> Metrics: ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...

    def close(self) -> None: ...


class WeightWorkers(Protocol):
    """The engines' end of a weight push over HTTP: a call goes to all workers, and returns when all have answered.

    Picklable, so that the push can begin where the weights are. Every method raises BackendError if a worker does not
    answer in time or refuses, with the worker's own words. Between `begin` and `end` nothing is sampled.
    """

    @property
    def urls(self) -> Sequence[str]:
        """Where they are."""
        ...

    @property
    def ranks(self) -> list[int]:
        """Processes that hold the model, by worker: its tensor-parallel size."""
        ...

    def begin(self, *, mode: str) -> None:
        """Pause generation: answers in flight go on afterwards (in_place, retract) or end (abort)."""
        ...

    def end(self, *, within_s: float | None = None) -> None:
        """Forget the prefix caches and go on; `within_s` where some may not answer any more."""
        ...

    def load_disk(self, folder: Path, *, version: str) -> None:
        """Take every tensor from a Hugging Face directory that the workers see."""
        ...

    def load_tensors(self, tensors: Sequence[tuple[str, Tensor]], *, version: str) -> None:
        """Take these tensors over shared memory (CPU) or CUDA IPC; workers on this machine only."""
        ...

    def join(self, *, host: str, port: int, world: int, name: str, backend: str) -> None:
        """Enter a process group: the trainer is rank 0, the workers follow in order. Blocks until all are in."""
        ...

    def load_broadcast(self, forms: Sequence[tuple[str, dtype, tuple[int, ...]]], *, name: str, version: str) -> None:
        """Receive these tensors, in this order, in the group `name`; returns when they have been loaded."""
        ...

    def leave(self, *, name: str) -> None: ...

    @property
    def checksums_by_hf_name(self) -> bool:
        """Whether they are `data.hashing.tensor_checksum` of the tensors that were sent; else the workers' own kind."""
        ...

    def checksums(self) -> list[dict[str, str]]:
        """A checksum of every tensor, by worker."""
        ...

    def scramble(self) -> None:
        """Noise into every tensor, so that one which is not loaded anew shows."""
        ...


class Ranks(Protocol):
    """Processes joined in one torch.distributed group, driven together."""

    def send(self, *request: Any) -> None:
        """Send one request to every rank. Raises BackendError if the group has ended."""
        ...

    def answers(self) -> Iterator[Any]:
        """The parts that rank 0 sends, then its result; raises what a rank raised, traceback and log tail as notes."""
        ...

    def end(self, *, polite: bool = True) -> None:
        """Let every rank leave, or make it."""
        ...


class Executor(Protocol):
    """Where work runs."""

    def group(self, serve: Callable[..., None], build: Callable[[], Any], *, ranks: int) -> Ranks:
        """N processes that join one torch.distributed group, then run `serve(build, pipe)`."""
        ...

    def host(self, build: Callable[[], Any], *, name: str, gpus: float = 0.0) -> Any:
        """An object that lives where the executor puts it; its methods can be called, its generators streamed."""
        ...

    def stream(self, make: Callable[[], Iterator[Item]], *, ahead: int) -> Iterator[Item]:
        """Carry an iterator, at most `ahead` items made before they are asked for (0: none)."""
        ...

    def map(
        self, fn: Callable[[Item], Result], items: Iterable[Item], *, workers: int, timeout_s: float | None = None
    ) -> Iterator[Result | BaseException]:
        """Apply `fn` in parallel, results in order; an exception or an overrun time limit comes back as the result."""
        ...


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Texts with what belongs to them; all rows have the same keys. The step is that of the table's axis."""
        ...

    def close(self) -> None: ...


class Weights(Protocol):
    """The tensors of a model by Hugging Face name, each read when it is asked for."""

    def forms(self) -> Mapping[str, tuple[tuple[int, ...], dtype]]:
        """Shape and dtype of every tensor, in the order in which reading is cheapest."""
        ...

    def get(self, name: str) -> Tensor:
        """One tensor, the caller's own. Raises CheckpointError if it cannot be read."""
        ...


class CheckpointFormat(Protocol):
    """A layout of weights on disk."""

    def read(self, path: Path) -> Iterator[tuple[str, Tensor]]: ...

    def open(self, path: Path) -> Weights: ...

    def write(self, path: Path, tensors: NamedTensors) -> None: ...


RewardFn = Callable[[Sample], "float | dict[str, Any]"]
"""Grades one sample; never raises on what a model wrote."""

Agent = Callable[..., Any]
"""`async (prompt, sample, generate, …) -> Sample`: how one attempt unfolds; called by parameter name."""

OnSample = Callable[[Sample, int | None, bool], Awaitable[Sample]]
"""Sees a sample that has been generated, and may give another: (sample, round where it is known, evaluation)."""

Keep = Callable[[list[Sample]], "bool | tuple[bool, str]"]
"""Whether a finished group goes on to training, and why not."""

FromBuffer = Callable[[list[list[Sample]], int, int], list[list[Sample]]]
"""Groups for a round, out of the buffer: (buffer, how many at most, which round); it removes what it takes."""

PromptSource = Callable[[], Iterator[Prompt]]
