"""Protocols of the parts that stages use. One contract suite per protocol runs against every implementation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, runtime_checkable

from slimectl.types import (
    Completion,
    Loss,
    Metrics,
    Prompt,
    Sample,
    SamplingParams,
    TableRow,
    TopTokens,
    TrainingSample,
)

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from slimectl.system.processes import ProcessView

Item = TypeVar("Item")
Result = TypeVar("Result")
NamedTensors = Iterable[tuple[str, "Tensor"]]


OnTokens = Callable[[int, list[int]], None]
"""Called with new tokens of a response, preceded by the index of the first of them. Index 0 restarts the response.

It is cheap, and may be called in any thread.
"""


class Engine(Protocol):
    """Samples text. Many requests in flight at once.

    An engine whose `generate` has a parameter `on_tokens` (OnTokens, or None) calls it as it samples.
    """

    async def generate(self, tokens: list[int], *, params: SamplingParams) -> Completion:
        """Continue `tokens`. Raises SettingsError if they leave no room in the context.

        An engine with `reads_images` true also takes `images`: the sources of the images whose placeholders are among
        the tokens, in their order.
        """
        ...

    async def abort(self) -> None:
        """Abort every request in flight. Each returns its tokens so far, with finish_reason "abort"."""
        ...

    async def close(self) -> None: ...


class WeightReceiver(Protocol):
    """An engine whose weights can be updated in place."""

    def load_weights(self, tensors: NamedTensors, *, version: str) -> None:
        """Replace weights in place by HF name. Raises CheckpointError on a missing, extra or misshapen tensor."""
        ...


class Policy(Protocol):
    """Weights and their optimizer. One object for one process or 512."""

    @property
    def weight_version(self) -> str:
        """ "0" before the first optimizer step, then the number of steps taken, resumes included."""
        ...

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        """Return log p(token) of every response token at the rollout temperature, without gradients. R floats a row."""
        ...

    def top_log_probs(self, rows: Sequence[TrainingSample], k: int) -> list[list[TopTokens]]:
        """Return the k likeliest tokens in place of every response token, like `log_probs`. R lists a row."""
        ...

    def forward_backward(self, rows: Sequence[TrainingSample], loss: Loss) -> Metrics:
        """Accumulate the gradient of `loss` over all rows (the global batch). Return summed metrics, with "loss"."""
        ...

    def optim_step(self) -> Metrics:
        """Clip, step, advance the schedule, zero the gradients. Return "grad_norm" (before clipping) and "lr"."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor once, under its Hugging Face name, full (unsharded), in checkpoint order."""
        ...

    def consume_weights(self, consumer: Callable[[NamedTensors], Any]) -> Any:
        """Call `consumer(weights)` in the process that holds the weights (rank 0), without a copy.

        With RankConsumers, several ranks are called at the same time. `consumer` must be picklable.
        """
        ...

    def save(self, path: Path) -> None:
        """Write weights (a loadable HF directory), optimizer, schedule and RNG into the empty folder `path`."""
        ...

    def load(self, path: Path) -> None:
        """Restore the state of `save` bit for bit, from any number of ranks. Raises CheckpointError."""
        ...

    def close(self) -> None: ...


class LogProbModel(Protocol):
    """Computes log-probabilities only: a frozen policy, or a server that has one."""

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        """Return log-probabilities like `Policy.log_probs`."""
        ...

    def top_log_probs(self, rows: Sequence[TrainingSample], k: int) -> list[list[TopTokens]]:
        """Return the k likeliest tokens in place of every response token, like `Policy.top_log_probs`."""
        ...

    def close(self) -> None: ...


class ResettableOptimizer(Protocol):
    """A policy or critic whose optimizer can start again (train.reset_optimizer_states)."""

    def reset_optimizer(self) -> None:
        """Set moments and the count of updates to zero. The step, and so the learning rate, stays."""
        ...


class BackgroundSaver(Protocol):
    """A policy or critic that writes checkpoints while training continues (run.async_save)."""

    def save_in_background(self, path: Path) -> None:
        """Copy the state, return, and write what `save` writes into the empty folder `path`. One at a time."""
        ...

    def is_saved(self) -> bool:
        """Return whether that is complete. Raises the error that ended it."""
        ...


@runtime_checkable
class PackProber(Protocol):
    """A policy or critic that measures how many tokens fit into a pack (train.max_tokens_per_gpu = auto)."""

    def measure_pack(self, rows: Sequence[TrainingSample], loss: Loss, tokens: int) -> float | None:
        """Compute rows forward and backward, in packs of so many tokens for each GPU, and discard the gradients.

        Returns the largest share of a rank's memory in use, or None if memory ran out. Reserves memory for the
        optimizer until `limit_packs`.
        """
        ...

    def limit_packs(self, tokens: int) -> None:
        """Limit packs to so many tokens for each GPU."""
        ...


class PreStepHook(Protocol):
    """A policy with a call before every optimizer step, for hooks on its ranks."""

    def before_step(self, rollout_id: int, step_id: int) -> None:
        """Announce the `step_id`-th step (from 0) of round `rollout_id`."""
        ...


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter and its base model: W + alpha / rank B A for every layer."""

    base: Path
    """Folder of the base model."""
    fingerprint: Callable[[Path], str]
    """Fingerprint of the tensors in that folder, by which an engine recognizes its own copy."""
    rank: int
    alpha: float
    layers: tuple[str, ...]
    tensors: NamedTensors
    """LAYER.lora_A.weight [rank, inputs] and LAYER.lora_B.weight [outputs, rank] of every layer, in float32."""


@runtime_checkable
class AdapterPolicy(Protocol):
    """A policy that trains a LoRA adapter and streams it alone."""

    def consume_adapter(self, consumer: Callable[[Adapter], Any]) -> Any:
        """Call `consumer(adapter)` in the process that holds the weights (rank 0). `consumer` must be picklable."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """A model on the trainer's GPUs that can leave them to the engines."""

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Move its memory to the host, or all but the weights. Its next call brings it back."""
        ...


class Critic(Protocol):
    """A model with one value per response token, and its optimizer. Methods shared with Policy mean the same."""

    @property
    def weight_version(self) -> str: ...

    def values(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        """Return the value of the state before every response token, without gradients. R floats a row."""
        ...

    def forward_backward(self, rows: Sequence[TrainingSample], loss: Loss) -> Metrics:
        """Accumulate gradients like a policy. The pack has values, with gradients, in place of log-probabilities."""
        ...

    def optim_step(self) -> Metrics: ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...

    def close(self) -> None: ...


INCOMPLETE = "-incomplete"
"""Suffix of the version while only a part of the weights is loaded: a push that broke off must not pass for a whole."""


class MessageMemory(Protocol):
    """Memory in which the tensors of a message are written where the engines read them."""

    @property
    def size(self) -> int:
        """Bytes of the tensors of one message."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: dtype) -> Tensor:
        """Return a tensor for the next message, which must have all of them. It is overwritten by the message after."""
        ...


@dataclass(frozen=True)
class RankConsumers:
    """Consumers of a policy's weights (Policy.consume_weights) by the rank that calls each."""

    by_rank: Mapping[int, Callable[[NamedTensors], Any]]

    def __call__(self, tensors: NamedTensors) -> Any:
        """Consume the weights of a policy that has only rank 0."""
        return self.by_rank[0](tensors)


class WeightUpdateClient(Protocol):
    """Client of the engines for weight updates over HTTP: a call goes to all workers and returns when all have replied.

    Picklable, so that the update can start in the process that holds the weights. Every method raises BackendError,
    with the worker's message, if a worker does not answer in time or refuses. Nothing is sampled between `begin` and
    `end`.
    """

    @property
    def urls(self) -> Sequence[str]:
        """Addresses of the workers."""
        ...

    def only(self, urls: Sequence[str]) -> Self:
        """Return a client of some of the workers."""
        ...

    @property
    def ranks(self) -> list[int]:
        """Number of model processes of each worker: its tensor-parallel size."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether `load_tensors` goes through shared memory on a CPU too."""
        ...

    def begin(self, *, mode: str) -> None:
        """Pause generation. Requests in flight continue afterwards (in_place, retract) or end (abort)."""
        ...

    def end(self, *, within_s: float | None = None) -> None:
        """Flush the prefix caches and continue generation. `within_s` is a timeout if workers may be dead."""
        ...

    @property
    def adapter_transports(self) -> Sequence[str]:
        """Transports by which the workers take an adapter alone: tensor, distributed, both or none."""
        ...

    def expect_adapter(self, adapter: Adapter) -> None:
        """Announce that the tensors of this update belong to an adapter, to be merged into its base model."""
        ...

    def load_disk(self, folder: Path, *, version: str, delta: Path | None = None) -> None:
        """Load every tensor from a Hugging Face directory that the workers can read.

        `delta` has what changed in it since another version: a worker that has this one may read that alone.
        """
        ...

    def message_memory(self, most_bytes: int) -> AbstractContextManager[MessageMemory | None]:
        """Lend memory for messages of at most `most_bytes`, or None if they do not use shared memory on a CPU."""
        ...

    def release_memory(self) -> None:
        """Release the memory for messages that this process keeps for its next push."""
        ...

    def load_tensors(self, tensors: Sequence[tuple[str, Tensor]], *, version: str) -> None:
        """Load these tensors over shared memory (CPU) or CUDA IPC. Workers on this machine only.

        The last message of an update has its version. Earlier messages have the version with the suffix INCOMPLETE.
        """
        ...

    def join(self, *, host: str, port: int, world: int, name: str, backend: str) -> None:
        """Join a process group: the trainer is rank 0, the workers follow in order. Blocks until all have joined."""
        ...

    def load_broadcast(self, forms: Sequence[tuple[str, dtype, tuple[int, ...]]], *, name: str, version: str) -> None:
        """Receive these tensors, in this order, in the group `name`. Returns when they have been loaded."""
        ...

    def leave(self, *, name: str) -> None: ...

    def sleep(self) -> None:
        """Release the memory of cache and weights, after ending requests in flight."""
        ...

    def wake(self) -> None:
        """Allocate the memory again. A push brings the weights and continues generation."""
        ...

    @property
    def checksums_by_hf_name(self) -> bool:
        """Whether checksums are `data.hashing.tensor_checksum` of the sent tensors, rather than engine-specific."""
        ...

    def checksums(self) -> list[dict[str, str]]:
        """Return a checksum of every tensor, by worker."""
        ...

    def randomize_weights(self) -> None:
        """Overwrite every tensor with noise, so a tensor that is not reloaded is detected."""
        ...


class WeightSync(Protocol):
    """Transfers the policy's weights to the engines. By default, `sleep`, `wake` and `close` do nothing."""

    def push(self) -> Metrics:
        """Push the weights to all engines and return metrics of the transfer: "bytes" and others.

        Raises BackendError if an engine refuses or is gone. The others continue.
        """
        ...

    def sleep(self) -> None:
        """Release the engines' GPU memory for the trainer. They get no requests until `wake`."""
        return

    def wake(self) -> None:
        """Allocate the engines' GPU memory again. The next push loads their weights."""
        return

    def close(self) -> None:
        """Remove files, process groups and shared memory."""
        return


class RankPipe(Protocol):
    """A rank's end of the pipe to its driver."""

    def recv_bytes(self) -> bytes:
        """Return the next request, pickled. Ends the rank, quietly, when the driver is gone."""
        ...

    def part(self, value: Any) -> None:
        """Send one part of a result."""
        ...

    def done(self, value: Any) -> None:
        """Send the last part of a result, or the whole."""
        ...

    def failed(self, error: BaseException) -> None:
        """Send the error of a request in place of its result."""
        ...


Serve = Callable[[Callable[[], Any], RankPipe], None]
"""Main function of a rank: builds its part and serves requests from the pipe."""


class RankGroup(Protocol):
    """Processes of one torch.distributed group, driven together."""

    def send(self, *request: Any) -> None:
        """Send one request to every rank. Raises BackendError if the group has ended."""
        ...

    def answers(self) -> Iterator[Any]:
        """Yield the parts that rank 0 sends, then its result. Raises a rank's error with traceback and log as notes."""
        ...

    def end(self, *, polite: bool = True) -> None:
        """End every rank: by request if `polite`, else by force."""
        ...


class Executor(Protocol):
    """Runs work in local processes or on a cluster."""

    def group(self, serve: Serve, build: Callable[[], Any], *, ranks: int) -> RankGroup:
        """Start N processes that join one torch.distributed group, then run `serve(build, pipe)`."""
        ...

    def host(self, build: Callable[[], Any], *, name: str, gpus: float = 0.0) -> Any:
        """Build an object in a process of the executor's choice. Its methods can be called, its generators streamed."""
        ...

    def end_host(self, name: str) -> None:
        """Free the GPUs of a hosted object that has ended, for others."""
        ...

    def rank_beside(self, name: str) -> int | None:
        """Return the rank that shares the first GPU of a hosted object, or None."""
        ...

    def stream(self, make: Callable[[], Iterator[Item]], *, ahead: int) -> Iterator[Item]:
        """Stream an iterator. At most `ahead` items are produced before they are requested (0: none)."""
        ...

    def map(
        self,
        fn: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        workers: int,
        timeout_s: float | None = None,
        wall_timeout_s: float | None = None,
        prepare: Callable[[Item], Any] | None = None,
    ) -> Iterator[Result | BaseException]:
        """Apply `fn` in parallel, results in order. An exception or a timeout is returned as the result.

        In a worker, an item may take `timeout_s` seconds of CPU time and `wall_timeout_s` seconds of wall-clock time
        (default: 12 times as many). Both begin when `prepare` has returned, which is called with the item first.
        An item that exceeds a limit is tried once more while no other is worked on, then its result is a TimeoutError.
        """
        ...

    def close(self) -> None:
        """End what it started, processes and hosted objects alike."""
        ...


@runtime_checkable
class StreamAbandoner(Protocol):
    """An executor whose streams wait, when they are closed, for the item that they produce."""

    def abandon_streams(self) -> None:
        """Let no stream wait for its item any longer."""
        ...


class Command(Protocol):
    """A command that runs in a slot."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it waits or runs."""
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal to the command, if it still runs."""
        ...


class Commands(Protocol):
    """Runs commands in slots. They end with this process, however it ends."""

    slots: int

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path, slot: int) -> Command:
        """Start a command in a free slot, from 0, with this environment. Its output is appended to `log`."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ProcessLister(Protocol):
    """An executor whose processes may be on other machines, or were not started by this process."""

    def list_processes(self, *, stacks: bool) -> list[ProcessView]:
        """Look at the processes, with their Python stacks if `stacks` is true."""
        ...


class Tracker(Protocol):
    """Logs metrics and tables to a service or file."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Log a table of texts. All rows have the same keys. `step` is the position on the table's axis."""
        ...

    def close(self) -> None: ...


class Progress(Protocol):
    """Shows progress: finished units, the current phase, and figures of the last unit."""

    @property
    def is_drawn(self) -> bool:
        """Whether a terminal draws it, which makes a line for every unit unnecessary."""
        ...

    def expect(self, total: int | None, *, done: int = 0) -> None:
        """Begin to count and measure `total` units, if known, of which `done` are finished."""
        ...

    def reach(self, done: int) -> None:
        """Report the number of finished units."""
        ...

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Set the phase of the block. Within nested blocks, the innermost phase is shown."""
        ...

    def part(self, done: int, total: int) -> None:
        """Report how much of the current phase is done."""
        ...

    def show(self, figures: Sequence[str]) -> None:
        """Show figures of the last unit, the most important one first, until the next ones."""
        ...


class NoProgress:
    """Progress that is not shown. The default of every stage."""

    is_drawn = False

    def expect(self, total: int | None, *, done: int = 0) -> None: ...

    def reach(self, done: int) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def part(self, done: int, total: int) -> None: ...

    def show(self, figures: Sequence[str]) -> None: ...


NO_PROGRESS: Progress = NoProgress()


class Weights(Protocol):
    """The tensors of a model by Hugging Face name, each read on demand."""

    def forms(self) -> Mapping[str, tuple[tuple[int, ...], dtype]]:
        """Return shape and dtype of every tensor, in the order in which reading is cheapest."""
        ...

    def get(self, name: str) -> Tensor:
        """Return one tensor, owned by the caller. Raises CheckpointError if it cannot be read."""
        ...


class CheckpointFormat(Protocol):
    """A layout of weights on disk."""

    def read(self, path: Path) -> Iterator[tuple[str, Tensor]]: ...

    def open(self, path: Path) -> Weights: ...

    def write(self, path: Path, tensors: NamedTensors) -> None: ...


RewardFn = Callable[[Sample], "float | dict[str, Any]"]
"""Grades one sample. Never raises on model output."""

Agent = Callable[..., Any]
"""`async (prompt, sample, generate, …) -> Sample`: generates one sample. Called by parameter name."""

SampleHook = Callable[[Sample, int | None, bool], Awaitable[Sample]]
"""Called with (sample, round if known, evaluation) after generation. Returns the sample or a replacement."""

GroupFilter = Callable[[list[Sample]], "bool | tuple[bool, str] | tuple[bool, str, bool]"]
"""Returns whether a finished group is trained on, a reason if not, and whether it is if too few others are left."""

BufferFilter = Callable[[list[list[Sample]], int, int], list[list[Sample]]]
"""Called with (buffer, maximum count, round). Removes groups from the buffer and returns them."""

PromptSource = Callable[[], Iterator[Prompt]]
