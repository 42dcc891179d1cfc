"""Traces a rank's program by operation: live memory, collectives, host reads and copies between devices."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slimectl.planner.simulation.collectives import Collective

ALLOCATION = 512
"""Bytes that CUDA's caching allocator rounds a tensor up to."""
READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
"""Operations whose result a program on a GPU waits for."""
COLLECTIVES = ("c10d", "_c10d_functional")
PEERS = ("root_rank", "src", "dst")
OURS = ("slimectl/", "megatron/core/", "transformers/models/")


@dataclass
class Memory:
    """Live bytes by device and by the phase that allocated them, and their peak since the last reset."""

    live: Counter[tuple[str, str]] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)
    at_peak: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, device: str, phase: str, size: int) -> None:
        self.live[device, phase] += size
        self.total[device] += size
        if self.total[device] > self.peak[device]:
            self.peak[device] = self.total[device]
            self.at_peak[device] = {name: n for (on, name), n in self.live.items() if on == device}

    def reset_peak(self) -> None:
        self.peak, self.at_peak = Counter(self.total), {}


class RankTrace(TorchDispatchMode):
    """Follows every operation on a rank's tensors while it is entered. `phase` names what the program does."""

    def __init__(self, tensor_type: type = Tensor) -> None:
        """`tensor_type`: tensors whose memory counts."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensor_type = tensor_type
        self.phase = "build"
        self.memory = Memory()
        self.collectives: list[Collective] = []
        self.reads: Counter[str] = Counter()
        """Waits for a GPU, by the place in the program."""
        self.moved: Counter[str] = Counter()
        """Bytes copied between devices, by direction and place."""
        self.host_work: Counter[str] = Counter()
        """Bytes of floating-point results that operations left on the host, by operation and place."""
        self._sizes: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def __enter__(self) -> RankTrace:
        # FSDP2 frees the tensors that it has gathered by resizing their storage to nothing.
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            if storage in self._sizes:
                entry = self._sizes[storage]
                self._count(entry, -entry[2])
                entry[1] = self.phase
                self._count(entry, _rounded(size))
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if func.namespace in COLLECTIVES:
            if (collective := _collective(func, args, kwargs)) is not None:
                self.collectives.append(collective)
            if name.endswith("coalesced_"):
                return FakeWork().boxed()  # torch (2.13) has no fake form of these
        elif name in READS and any(tensor.is_cuda for tensor in _tensors(args)):
            self.reads[f"{self.phase}: {name.removeprefix('aten::')} at {place()}"] += 1
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        for tensor in outputs:
            self._follow(tensor)
        self._check_devices(name, _tensors((args, kwargs)), outputs)
        return result

    def _follow(self, tensor: Tensor) -> None:
        if not isinstance(tensor, self.tensor_type):
            return
        storage = tensor.untyped_storage()
        if storage not in self._sizes:
            entry = [tensor.device.type, self.phase, 0]
            self._sizes[storage] = entry
            self._count(entry, _rounded(storage.nbytes()))
            weakref.finalize(storage, self._free, entry)

    def _count(self, entry: list[Any], size: int) -> None:
        self.memory.add(entry[0], entry[1], size)
        entry[2] += size

    def _free(self, entry: list[Any]) -> None:
        self._count(entry, -entry[2])

    def _check_devices(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if name in ("aten::_to_copy", "aten::copy_") and outputs:
            source, target = inputs[-1].device.type, outputs[0].device.type
            if source != target and "meta" not in (source, target):
                where = f"{self.phase}: {source} to {target} at {place()}"
                self.moved[where] += outputs[0].numel() * outputs[0].element_size()
                if target == "cpu":
                    self.reads[f"{self.phase}: copy to host at {place()}"] += 1
            return
        if name.startswith("aten::") and "lift_fresh" not in name and inputs:
            for tensor in outputs:
                if tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.numel() > 1:
                    size = tensor.numel() * tensor.element_size()
                    self.host_work[f"{self.phase}: {name.removeprefix('aten::')} at {place()}"] += size


@contextmanager
def phase(trace: RankTrace, name: str) -> Iterator[None]:
    """Name what the program does inside."""
    before, trace.phase = trace.phase, name
    try:
        yield
    finally:
        trace.phase = before


def _rounded(size: int) -> int:
    return -(-size // ALLOCATION) * ALLOCATION


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def place() -> str:
    """Return file and line of the innermost frame of this package, or of a library that has the model's code."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if any(part in path for part in OURS) and "slimectl/planner/simulation/" not in path:
            return f"{Path(path).parent.name}/{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "torch"


def _collective(func: Any, args: Any, kwargs: Any) -> Collective | None:
    """Describe a call, or None for the wait that follows one."""
    if func._schema.name.endswith(("wait_tensor", "barrier")):
        return None
    names = [argument.name for argument in func._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    group = _group(values)
    tensors = tuple(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in _tensors(list(values.values())))
    peer = next((int(values[name]) for name in PEERS if name in values), None)
    sent, received = (tuple(values.get(f"{side}_split_sizes") or ()) for side in ("input", "output"))
    name = func._schema.name.partition("::")[2]
    return Collective(name, group, tensors, peer, sent, received)


def _group(values: dict[str, Any]) -> tuple[int, ...]:
    for value in values.values():
        if isinstance(value, torch.ScriptObject):
            try:
                return tuple(dist.get_process_group_ranks(ProcessGroup.unbox(value)))
            except (RuntimeError, TypeError, ValueError):
                continue
    return tuple(dist.get_process_group_ranks(_resolve_process_group(values["group_name"])))
