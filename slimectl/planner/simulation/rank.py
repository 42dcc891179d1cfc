"""Runs the training step of one rank on fake tensors.

The command is `python -m slimectl.planner.simulation.rank < TASK > RESULT`, with both files in JSON.

E experts · L experts of a rank.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from slimectl.architectures.registry import family_of
from slimectl.planner.simulation import cuda
from slimectl.planner.simulation.collectives import Collective
from slimectl.planner.simulation.trace import RankTrace, phase, place
from slimectl.protocols import NamedTensors
from slimectl.settings import Settings
from slimectl.types import TrainingSample

SCALAR = 2.0
"""Value of every floating-point number that the program reads: a gradient norm that is clipped."""


@dataclass(frozen=True)
class SimulatedWork:
    """Task of a rank: `packs` packs for every data-parallel rank, with sequences of `seq_len` tokens."""

    rank: int
    ranks: int
    data: int
    config: dict[str, Any]
    settings: dict[str, Any]
    seq_len: int
    response_len: int
    pack: int
    packs: int
    message: tuple[int, ...] = ()
    """Shape of the hidden states that pipeline stages exchange, which a receiver reads from a message."""
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Result:
    """Result of a rank: bytes on GPU and host, and the collectives, waits and copies of the last step."""

    rank: int
    peak: int
    at_peak: dict[str, int]
    """Bytes at the peak by the phase that allocated them."""
    resident: int
    """Bytes on the GPU between steps."""
    host_peak: int
    host_resident: int
    collectives: list[Collective]
    reads: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    host_work: dict[str, int] = field(default_factory=dict)
    packs: int = 1
    """Packs of the step."""


class EmptyWeights:
    """protocols.CheckpointFormat and Weights of a model by its configuration: tensors without values, on the host."""

    def __init__(self, config: dict[str, Any]) -> None:
        links = family_of(config).links(config)
        self.shapes = {name: shape for link in links for name, shape in zip(link.hf, link.shapes, strict=True)}

    def read(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        for name in self.shapes:
            yield name, self.get(name)

    def open(self, path: Path) -> EmptyWeights:
        return self

    def forms(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (shape, torch.bfloat16) for name, shape in self.shapes.items()}

    def get(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], dtype=torch.bfloat16)

    def write(self, path: Path, tensors: NamedTensors) -> None:
        raise NotImplementedError("a simulation does not write checkpoints")


class SimulatedRank(RankTrace):
    """A trace that answers what depends on data: numbers that are read, and objects that ranks exchange."""

    def __init__(self, task: SimulatedWork) -> None:
        super().__init__(FakeTensor)
        self.rows: dict[int, list[float]] = {}
        """Values of the response tokens of every row of the step. No rank has all of them."""
        self.message = list(task.message)
        self.topk = int(task.config.get("num_experts_per_tok") or 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            self.read_back("item", args[0])
            return SCALAR if args[0].dtype.is_floating_point else 1
        if func is torch.ops.aten.equal.default and isinstance(args[0], FakeTensor):
            return True  # frozen weights, which bfloat16 holds without rounding
        if func is torch.ops.aten.masked_select.default and isinstance(args[0], FakeTensor):
            # The tokens that chose each expert.
            self.read_back("masked_select", args[0])
            selected = args[0].new_empty(args[1].shape[-1] * self.topk)
            self._follow(selected)
            return selected
        return super().__torch_dispatch__(func, types, args, kwargs)

    def read_back(self, name: str, tensor: Tensor) -> str:
        """Count a wait for the GPU. Returns the place of the program."""
        where = place()
        if tensor.is_cuda:
            self.reads[f"{self.phase}: {name} at {where}"] += 1
        return where

    def gather_objects(self, parts: list[Any], part: Any, group: Any = None) -> None:
        """dist.all_gather_object of ranks that contribute what this one does, or all rows' log-probabilities."""
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        self.collectives.append(Collective("all_gather_object", ranks, ()))
        parts[:] = [self.rows if self.phase == "log_probs" else part] * len(parts)

    def listed(self, tensor: Tensor) -> Any:
        """Tensor.tolist of a fake tensor."""
        where = self.read_back("tolist", tensor)
        if "p2p_communication" in where:
            return self.message
        if "moe_utils" in where:
            return list(range(tensor.numel()))  # an order of experts: any has the same sizes
        value: Any = SCALAR if tensor.dtype.is_floating_point else 1
        for size in reversed(tensor.shape):
            value = [value] * size
        return value


def balance_routing(trace: SimulatedRank) -> None:
    """Give the experts of megatron-core (0.16.1) equal numbers of tokens, for which its ranks wait."""
    dispatcher: Any = sys.modules.get("megatron.core.transformer.moe.token_dispatcher")
    if dispatcher is None:
        return

    def counts_on_host(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point != self.cuda_dtoh_point:
            return tokens_per_expert
        if tokens_per_expert is not None:
            trace.read_back("numbers of tokens", tokens_per_expert)
        whole, rest = divmod(int(self.num_out_tokens), self.num_experts)
        counts_E = np.full(self.num_experts, whole) + (np.arange(self.num_experts) < rest)
        local_L = counts_E[self.local_expert_indices]
        self.input_splits = counts_E.reshape(self.ep_size, -1).sum(1)
        self.output_splits = np.full(self.ep_size, local_L.sum())
        self.output_splits_tp = np.full(self.tp_size, local_L.sum() * self.ep_size)
        self.num_global_tokens_per_local_expert = np.tile(local_L, (self.tp_size * self.ep_size, 1))
        return torch.tensor((local_L * self.tp_size * self.ep_size).tolist())

    dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = counts_on_host


def simulate(task: SimulatedWork) -> Result:
    """Run two steps and return the result of the second. The first allocates the persistent memory."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from slimectl.algorithms.registry import ALGORITHMS
    from slimectl.runtime import builders

    cuda.install(gpu=task.rank % task.gpus_per_node, gpus=task.gpus_per_node)
    dist.init_process_group("fake", rank=task.rank, world_size=task.ranks, store=FakeStore())
    settings = Settings.model_validate(task.settings)
    trace = SimulatedRank(task)
    dist.all_gather_object = trace.gather_objects  # type: ignore[assignment]
    FakeTensor.tolist = lambda tensor: trace.listed(tensor)  # type: ignore[method-assign, assignment]
    loss_of = ALGORITHMS[settings.algorithm.name].loss
    with tempfile.TemporaryDirectory() as folder, cuda.CudaMode(allow_non_fake_inputs=True) as mode, trace:
        (Path(folder) / "config.json").write_text(json.dumps(task.config))
        policy = builders.rank_policy(settings, Path(folder), EmptyWeights(task.config))
        mode.builds_on_meta = False
        balance_routing(trace)
        for packs in (1, task.packs):
            rows = rows_of(task, packs)
            trace.collectives.clear()
            for counter in (trace.reads, trace.moved, trace.host_work):
                counter.clear()
            trace.memory.reset_peak()
            trace.rows = dict.fromkeys(range(len(rows)), rows[0].old_log_probs or [])
            loss = loss_of(settings.algorithm, rows)
            if packs == task.packs:
                with phase(trace, "log_probs"):
                    policy.log_probs(rows)
            with phase(trace, "forward_backward"):
                policy.forward_backward(rows, loss)
            with phase(trace, "optim_step"):
                policy.optim_step()
    return _result(task, trace)


def rows_of(task: SimulatedWork, packs: int) -> list[TrainingSample]:
    """Return rows that fill `packs` packs of every data-parallel rank, without common tokens."""
    # One token more than is computed, because the last token predicts nothing.
    count = task.data * packs * max(1, task.pack // task.seq_len)
    rest, ones = [0] * task.seq_len, [1.0] * task.response_len
    weights, old = [1.0 / (count * task.response_len)] * task.response_len, [-1.0] * task.response_len
    vocabulary = int(task.config["vocab_size"])
    return [
        TrainingSample([i % vocabulary, i // vocabulary, *rest[1:]], task.response_len, weights, ones, old, group=i)
        for i in range(count)
    ]


def _result(task: SimulatedWork, trace: RankTrace) -> Result:
    memory = trace.memory
    return Result(
        task.rank, memory.peak["cuda"], memory.at_peak.get("cuda", {}), memory.total["cuda"], memory.peak["cpu"],
        memory.total["cpu"], trace.collectives, dict(trace.reads), dict(trace.moved), dict(trace.host_work),
        task.packs,
    )  # fmt: skip


def main() -> None:
    task = SimulatedWork(**json.load(sys.stdin))
    with contextlib.redirect_stdout(sys.stderr):
        result = simulate(task)
    json.dump(asdict(result), sys.stdout)


if __name__ == "__main__":
    main()
