"""What a trainer does when a pack does not fit into memory: divide it, then recompute its activations."""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slimectl.errors import OutOfMemoryError
from slimectl.planner.devices import count_pack_split, is_out_of_memory
from slimectl.policies.options import TrainerOptions
from slimectl.policies.pack_plan import PackPlan
from slimectl.system.stdio import logger
from slimectl.types import Loss, Metrics, TrainingSample

Result = TypeVar("Result")

RECOMPUTE = {"train.gradient_checkpointing": True}
STATE_BYTES = {"float32": 8, "bfloat16": 4, "int8": 3}
"""Bytes of the moments of a parameter, at most."""
MOST_LEFT_OUT = 0.1
"""Share of the samples of a step that may be left out because they do not fit alone. One always may."""
LAST_RESORT = (
    "Lower rollout.max_response_len, use more ranks (cluster.actor_num_gpus_per_node), or set"
    ' train.offload = "parameters"'
)


def unless_out_of_memory(compute: Callable[[], Result]) -> Result | None:
    """Return the result of `compute`, or None if memory ran out. What it had allocated is then free again."""
    try:
        return compute()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Only here is the traceback gone, whose frames hold the activations.
    gc.collect()
    _forget_failed_backward()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def _forget_failed_backward() -> None:
    """Free the tensors of a backward pass that failed in this thread.

    torch (2.13) keeps its remaining tasks in a queue, and drops them when a task with a lower number has its turn. The
    numbers of a new thread begin at 0. Delete this when a failed pass leaves no tasks.
    """
    oldest: list[Tensor] = []
    thread = threading.Thread(target=lambda: oldest.append(torch.zeros((), requires_grad=True) * 1))
    thread.start()
    thread.join()
    with torch.enable_grad():
        oldest[0].backward()


def divided(options: TrainerOptions, plan: PackPlan, ranks: int = 1) -> TrainerOptions | None:
    """Return options that divide the rows of a pack among smaller ones, or None for a pack of a single row.

    `ranks` context-parallel ranks share a pack, each with max_tokens_per_pack.
    """
    if len(plan.rows) < 2:
        return None
    batching = options.batching
    if batching.micro_batch_size is not None:
        return replace(options, batching=replace(batching, micro_batch_size=len(plan.rows) // 2))
    return replace(options, max_tokens_per_pack=max(1, plan.computed_tokens(padded=batching.padded) // (2 * ranks)))


class PackTooLargeError(Exception):
    """A pack that is measured does not fit."""


class PackFitter:
    """Computes packs in the memory that there is.

    A pack that does not fit is divided, and so are later packs of its size. A row that does not fit has its activations
    recomputed in the backward pass. `planning` are the options with which the next packs are planned.

    With `retries`, the trainer then computes its rows again. Otherwise, because other ranks wait in a collective call,
    OutOfMemoryError names the settings with which the model has to be built again. A pack is shared by `ranks`
    context-parallel ranks.
    """

    def __init__(
        self, planning: TrainerOptions, *, retries: bool, recompute: Callable[[], None] | None = None, ranks: int = 1
    ) -> None:
        """`recompute` turns on the recomputation of all layers."""
        self.planning = planning
        self.left_out: list[TrainingSample] = []
        """Rows of this step that do not fit alone."""
        self._retries, self._recompute, self._ranks = retries, recompute, ranks
        self.recomputes = planning.recompute.granularity == "full"
        self._start = self._settings
        self._probing = False

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings that limit packs, as they are now."""
        size = self.planning.batching.micro_batch_size
        limit = {"train.max_tokens_per_gpu": self.planning.max_tokens_per_pack}
        return (limit if size is None else {"train.micro_batch_size": size}) | (RECOMPUTE if self.recomputes else {})

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint stores, so that a resume has the same packs: nothing, if every pack has fit."""
        return {} if self._settings == self._start else {"packs": {"set": self._start, "fit": self._settings}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the packs of a checkpoint, unless the settings have changed."""
        packs = state.get("packs")
        if packs is None or packs["set"] != self._start:
            return
        fit = packs["fit"]
        self.limit(fit.get("train.max_tokens_per_gpu"), fit.get("train.micro_batch_size"))
        if fit.get("train.gradient_checkpointing") and self._recompute and not self.recomputes:
            self._turn_on_recomputation()

    def limit(self, tokens: int | None = None, size: int | None = None) -> None:
        """Limit packs to so many tokens for each rank, or so many rows."""
        if tokens is not None:
            self.planning = replace(self.planning, max_tokens_per_pack=tokens)
        if size is not None:
            self.planning = replace(self.planning, batching=replace(self.planning.batching, micro_batch_size=size))

    def begin(self, tokens: int) -> None:
        """Begin with packs of so many tokens for each rank, which were measured."""
        self.limit(tokens)
        self._start = self._settings

    @contextmanager
    def probing(self, tokens: int) -> Iterator[None]:
        """Use packs of so many tokens in the block. Raises PackTooLargeError or OutOfMemoryError."""
        planning, self._probing = self.planning, True
        self.limit(tokens)
        try:
            yield
        finally:
            self.planning, self._probing = planning, False

    def compute(self, work: Callable[[], Result], plan: PackPlan, *, trains: bool) -> Result | None:
        """Return the result of `work` on a pack. If it does not fit, adapt to that and return None.

        `trains` is whether gradients are computed. Raises OutOfMemoryError.
        """
        result = unless_out_of_memory(work)
        if result is None:
            self.adapt([plan], trains=trains)
        return result

    def adapt(self, plans: Sequence[PackPlan], *, trains: bool) -> None:
        """Make one of these packs need less memory. Raises OutOfMemoryError if other ranks or settings have to."""
        if self._probing and self._retries:
            raise PackTooLargeError
        plan = max(plans, key=lambda plan: (len(plan.rows) > 1, len(plan.tokens_T)))
        tokens = plan.computed_tokens(padded=self.planning.batching.padded)
        kind = "training" if trains else "scoring"
        count_pack_split()
        smaller = divided(self.planning, plan, self._ranks)
        if smaller is not None:
            self._adopt(f"out of memory in a {kind} pack of {tokens} tokens", smaller)
        elif trains and not self.recomputes and plan.rows:
            fault = f"out of memory in training {_name(plan)} of {tokens} tokens alone"
            if not self._retries or self._recompute is None:
                raise OutOfMemoryError(f"{fault}. Set train.gradient_checkpointing = true", RECOMPUTE)
            self._turn_on_recomputation()
            logger.warning(
                f"{fault}. Its activations are recomputed from now on. To avoid this, set"
                " train.gradient_checkpointing = true"
            )
        elif trains and self._retries and plan.rows:
            self.left_out += plan.rows
            logger.warning(
                f"out of memory in training {_name(plan)} of {tokens} tokens alone, with recomputed activations. This"
                f" step leaves it out. {LAST_RESORT}"
            )
        else:
            raise OutOfMemoryError(
                f"out of memory in a {kind} pass over {_name(plan)} of {tokens} tokens alone. {LAST_RESORT}"
            )

    def _adopt(self, fault: str, smaller: TrainerOptions) -> None:
        before, self.planning = self.planning, smaller
        [(name, value)] = [(name, value) for name, value in self._settings.items() if name not in RECOMPUTE]
        if not self._retries:
            self.planning = before
            raise OutOfMemoryError(f"{fault}. Set {name} = {value}", {name: value})
        logger.warning(f"{fault}. Packs are smaller from now on. To avoid this, set {name} = {value}")

    def _turn_on_recomputation(self) -> None:
        assert self._recompute is not None
        self._recompute()
        self.recomputes = True

    def kept(self, rows: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the rows of this step that fit. Raises OutOfMemoryError if too many do not."""
        left_out = {id(row) for row in self.left_out}
        kept = [row for row in rows if id(row) not in left_out]
        missing = len(rows) - len(kept)
        if missing > max(1, MOST_LEFT_OUT * len(rows)) or (rows and not kept):
            raise OutOfMemoryError(
                f"out of memory in training {missing} of the {len(rows)} samples of a step alone. {LAST_RESORT}"
            )
        return kept


class MeasuresPacks(ABC):
    """Base class of trainers that implement protocols.PackProber."""

    fitter: PackFitter
    device: torch.device
    ranks: int
    _reserved: Tensor | None = None
    """Memory that the optimizer will need after the first update."""

    @abstractmethod
    def forward_backward(self, rows: Sequence[TrainingSample], loss: Loss) -> Metrics: ...

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Begin a step without gradients."""

    @abstractmethod
    def _optimizers(self) -> Iterable[torch.optim.Optimizer]:
        """Return the optimizers, whose states may not exist yet."""

    def measure_pack(self, rows: Sequence[TrainingSample], loss: Loss, tokens: int) -> float | None:
        """Implement protocols.PackProber.measure_pack."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        fits = True
        try:
            with self.fitter.probing(tokens):
                if self._reserved is None:
                    self._reserved = torch.empty(self._missing_bytes(), dtype=torch.uint8, device=self.device)
                self.forward_backward(rows, loss)
        except PackTooLargeError:
            fits = False
        self._drop_gradients()
        share = torch.tensor(_used_share(self.device) if fits else float("inf"), device=self.device)
        if self.ranks > 1:
            dist.all_reduce(share, dist.ReduceOp.MAX)
        return share.item() if share.isfinite() else None

    def limit_packs(self, tokens: int) -> None:
        """Implement protocols.PackProber.limit_packs."""
        self._reserved = None
        self.fitter.begin(tokens)

    def _missing_bytes(self) -> int:
        """Return the bytes of moments on the device that optimizers create in their first update."""
        bytes_each = STATE_BYTES[self.fitter.planning.optimizer.state_dtype]
        return sum(
            bytes_each * parameter.numel()
            for optimizer in self._optimizers()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.device.type == self.device.type and not optimizer.state.get(parameter)
        )


def _used_share(device: torch.device) -> float:
    """Return the share of a GPU's memory that is in use by other processes, and was at most by this one."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return float((others + torch.cuda.max_memory_reserved(device)) / total)


def _name(plan: PackPlan) -> str:
    """Name the only row of a pack."""
    if not plan.rows:
        return "a pack without samples"
    [row] = plan.rows
    return "a sample" if row.index is None else f"sample {row.index}"


def optimizer_error() -> OutOfMemoryError:
    """Return the error for an update that did not fit. Smaller packs would not help."""
    return OutOfMemoryError(
        'out of memory in the update of the optimizer. Set train.optimizer_state_dtype = "bfloat16" or train.offload ='
        ' "optimizer", or use more ranks (cluster.actor_num_gpus_per_node), and continue from the last checkpoint'
    )
