"""Access to the float32 masters of a rank's parameters and their moments in any of mcore's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from slimectl.policies.moments import ShardElements

PARAM = "param"
"""Slot name of the float32 parameter itself. The other slots are moments."""


@dataclass
class Master:
    """This rank's part of the float32 master of one parameter, and of its moments.

    `main` is the master, or its part [start, stop) of the flat parameter if it is sharded over data ranks. It is None
    if this rank has no part. `inner` is the torch optimizer, None for a frozen parameter.
    """

    parameter: Tensor
    main: Tensor | None
    inner: Any = None
    start: int = 0
    stop: int = 0
    group: dist.ProcessGroup | None = None

    def read(self, slot: str, value: Callable[[Tensor], Tensor]) -> Tensor:
        """Read `slot` (PARAM or a moment) in the parameter's shape. Collective over the data ranks that share it.

        `value` returns the values of a tensor that may be asleep (HostMemory.value).
        """
        local = self._local_part(slot)
        if local is not None:
            local = value(local).detach()
        if self.group is None:
            assert local is not None
            return local.to(self.parameter.device)
        flat = torch.zeros(self.parameter.numel(), dtype=torch.float32, device=self.parameter.device)
        if local is not None:
            flat[self.start : self.stop] = local
        dist.all_reduce(flat, group=self.group)
        return flat.view(self.parameter.shape)

    @torch.no_grad()
    def write(self, slot: str, value: Tensor, *, updates: int) -> None:
        """Write `value` (in the parameter's shape) to `slot`. A moment also gets the step count `updates`."""
        if slot == PARAM:
            self.parameter.copy_(value)
            if self.inner is None:
                # Frozen: if the parameter rounds a value, the value is also kept, so that it is saved unchanged.
                self.main = self.parameter if torch.equal(self.parameter.to(value.dtype), value) else value.clone()
                return
        if self.main is None:
            return
        part = value.reshape(-1)[self.start : self.stop].view_as(self.main) if self.group is not None else value
        if slot == PARAM:
            self.main.copy_(part)
        slots, device = self._slots()
        if slot != PARAM:
            dtype = getattr(self.inner, "moment_dtype", torch.float32)
            slots[slot] = part.to(device, dtype).reshape(self.main.shape).clone()
            slots["step"] = torch.tensor(float(updates), device=device)
        elif isinstance(self.inner, HybridDeviceOptimizer) and self.main in self.inner.gpu_params_map_cpu_copy:
            self.inner.gpu_params_map_cpu_copy[self.main].copy_(part)

    def forget(self) -> None:
        """Drop the moments, as before the first update."""
        if self.main is not None and self.inner is not None:
            self._slots()[0].clear()

    def _local_part(self, slot: str) -> Tensor | None:
        if slot == PARAM or self.main is None:
            return self.main
        moment = self._slots()[0].get(slot)
        return torch.zeros_like(self.main, dtype=torch.float32) if moment is None else moment.to(self.main.device)

    def _slots(self) -> tuple[dict[str, Tensor], torch.device]:
        """Return the optimizer state of this master, and its device."""
        assert self.main is not None
        if not isinstance(self.inner, HybridDeviceOptimizer):
            return self.inner.state[self.main], self.main.device
        inner_parameter = self.inner.param_to_inner_param[self.main]
        for part in self.inner.sub_optimizers:
            if any(inner_parameter is parameter for group in part.param_groups for parameter in group["params"]):
                return part.state[inner_parameter], inner_parameter.device
        raise AssertionError("the hybrid optimizer lacks one of its parameters")


def masters(tensors: Sequence[Tensor], optimizer: Any) -> list[Master]:
    """Return the master of each of a rank's parameters or buffers."""
    shared: dict[Tensor, Master] = {}
    unsharded: dict[Tensor, Any] = {}
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        if isinstance(part, DistributedOptimizer):
            shared |= _sharded_masters(part)
        else:
            unsharded |= {main: part.optimizer for group in part.optimizer.param_groups for main in group["params"]}
    result = []
    for tensor in tensors:
        main = getattr(tensor, "main_param", None)
        main = tensor if main is None else main
        result.append(shared[tensor] if tensor in shared else Master(tensor, main, unsharded.get(main)))
    return result


def _sharded_masters(part: DistributedOptimizer) -> dict[Tensor, Master]:
    result = {}
    for parameter in [parameter for buffer in part.buffers for parameter in buffer.params]:
        master = Master(parameter, None, part.optimizer, group=part.data_parallel_group)
        if parameter in part.model_param_gbuf_map:
            param_range = part._get_model_param_range_map(parameter)["param"]
            group, order = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group]["params"][order]
            master = replace(master, main=main, start=param_range.start, stop=param_range.end)
        result[parameter] = master
    return result


def shard_elements(part: Any) -> dict[Tensor, ShardElements]:
    """Return the elements of its parameter that each master has. Without ranks, none is sharded."""
    if not isinstance(part, DistributedOptimizer):
        return {}
    masters = _sharded_masters(part).values()
    return {master.main: ShardElements(master.start) for master in masters if master.main is not None}
