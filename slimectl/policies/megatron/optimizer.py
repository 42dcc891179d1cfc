"""mcore's optimizer under the settings of every policy: AdamW on float32 masters, whole or cut over data ranks.

The learning rate is policies.optimizer.lr_at's, set on the parameter groups before each update. mcore's
OptimizerParamScheduler cannot give those numbers: stepped before an update (so that warm-up does not begin at 0), its
decay is one step ahead; stepped after it, its warm-up is one behind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from slimectl.errors import SettingsError
from slimectl.policies.megatron.config import args_of
from slimectl.policies.megatron.model import PackedGPT
from slimectl.policies.optimizer import OptimizerOptions

PARAM = "param"
"""What Master calls the float32 parameter itself, beside the moments."""

_OURS = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
"""Arguments of mcore that are settings of [train] here."""
_REFUSED = {
    "overlap_grad_reduce": "gradients are shared once a step, after all of its micro-batches",
    "overlap_param_gather": "weights are read between steps",
    "use_megatron_fsdp": 'that is train.policy = "fsdp"',
    "average_in_collective": "a loss here is a sum",
    "use_precision_aware_optimizer": "masters are float32",
    "optimizer": "it is AdamW",
}


@dataclass(frozen=True)
class OptimizerChoices:
    """How the optimizer is laid out; `args` are the user's [megatron.args]."""

    distributed: bool = True
    cpu_offload: bool = False
    args: Mapping[str, Any] | None = None


def wrapped(chunks: Sequence[PackedGPT], choices: OptimizerChoices) -> list[DistributedDataParallel]:
    """The chunks with float32 main gradients. Raises SettingsError for an argument that cannot be had."""
    args = choices.args or {}
    for name in (name for name in args if name in _OURS):
        raise SettingsError(f"megatron.args.{name}: is a setting of its own; see `slimectl settings explain train`")
    for name in (name for name in args if args[name] and name in _REFUSED):
        raise SettingsError(f"megatron.args.{name}: is not possible ({_REFUSED[name]}); drop it")
    fields = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": choices.distributed,
        **args_of(args, DistributedDataParallelConfig),
    }
    config = chunks[0].config
    return [
        DistributedDataParallel(config, DistributedDataParallelConfig(**fields), chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]


def build(chunks: Sequence[DistributedDataParallel], options: OptimizerOptions, choices: OptimizerChoices) -> Any:
    """mcore's optimizer of the parameters that take gradients."""
    config = chunks[0].config
    fields = {
        "lr": options.lr,
        "min_lr": options.min_lr,
        "weight_decay": options.weight_decay,
        "adam_beta1": options.betas[0],
        "adam_beta2": options.betas[1],
        "adam_eps": options.eps,
        "clip_grad": options.clip_grad,
        "bf16": config.bf16,
        "fp16": config.fp16,
        "params_dtype": config.params_dtype,
        "use_distributed_optimizer": choices.distributed,
        # Without a GPU all of it lies in host memory already, and mcore's hybrid optimizer knows copies only.
        "optimizer_cpu_offload": choices.cpu_offload and torch.cuda.is_available(),
        "optimizer_offload_fraction": 1.0,
        **args_of(choices.args or {}, OptimizerConfig),
    }
    # Without gradients: views of float32 parameters would be no leaves, which optimizers on the CPU refuse.
    with torch.no_grad():
        # Gloo groups serve checkpoints of an old format only.
        optimizer = get_megatron_optimizer(OptimizerConfig(**fields), list(chunks), use_gloo_process_groups=False)
    for inner in inners(optimizer):
        for group in inner.param_groups:
            # The scheduler of mcore would do this: without it norms and biases decayed too.
            group["weight_decay"] = options.weight_decay * group["wd_mult"]
            if isinstance(inner, torch.optim.AdamW):
                group["fused"] = True
    return optimizer


def inners(optimizer: Any) -> list[Any]:
    """The torch (or TransformerEngine, or hybrid) optimizers inside mcore's."""
    return [part.optimizer for part in optimizer.chained_optimizers if not part.is_stub_optimizer]


def step(chunks: Sequence[DistributedDataParallel], optimizer: Any, *, lr: float, clip: float) -> tuple[float, bool]:
    """Share the gradients, clip, update; the norm before clipping, and whether it was finite: else no update."""
    finalize_model_grads(list(chunks), None)
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if math.isfinite(norm):
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if clip and parameters:
                clip_grad_by_total_norm_fp32(parameters, clip, norm)
            for group in part.param_groups:
                group["lr"] = lr * group["lr_mult"]
        optimizer.step_with_ready_grads()
    drop_gradients(chunks, optimizer)
    return norm, math.isfinite(norm)


def resume(optimizer: Any, *, updates: int) -> None:
    """Set the counts that optimizers of apex and TransformerEngine keep per group; torch's are per parameter."""
    for inner in inners(optimizer):
        if not isinstance(inner, torch.optim.AdamW | HybridDeviceOptimizer):
            for group in inner.param_groups:
                group["step"] = updates


def drop_gradients(chunks: Sequence[DistributedDataParallel], optimizer: Any) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


@dataclass
class Master:
    """The float32 master of one parameter and its moments, as far as this rank holds them.

    `main` is the master, or its part [start, stop) of the flat parameter where data ranks share it; None if this rank
    has no part. `inner` is the torch optimizer, None for what is not trained.
    """

    parameter: Tensor
    main: Tensor | None
    inner: Any = None
    start: int = 0
    stop: int = 0
    group: dist.ProcessGroup | None = None

    def read(self, what: str) -> Tensor:
        """PARAM or a moment in the parameter's shape; where data ranks share it, all of them must ask."""
        held = self._held(what)
        if self.group is None:
            assert held is not None
            return held.detach()
        flat = torch.zeros(self.parameter.numel(), dtype=torch.float32, device=self.parameter.device)
        if held is not None:
            flat[self.start : self.stop] = held.detach()
        dist.all_reduce(flat, group=self.group)
        return flat.view(self.parameter.shape)

    @torch.no_grad()
    def write(self, what: str, value: Tensor, *, updates: int) -> None:
        """Take over `value` (the parameter's shape); a moment after `updates` updates."""
        if what == PARAM:
            self.parameter.copy_(value)
            if self.inner is None:
                # Frozen: a value that the parameter rounds is kept beside it, to be given back as it came.
                self.main = self.parameter if torch.equal(self.parameter.to(value.dtype), value) else value.clone()
                return
        if self.main is None:
            return
        part = value.reshape(-1)[self.start : self.stop].view_as(self.main) if self.group is not None else value
        if what == PARAM:
            self.main.copy_(part)
        slots, device = self._slots()
        if what != PARAM:
            slots[what] = part.to(device, torch.float32).reshape(self.main.shape).clone()
            slots["step"] = torch.tensor(float(updates), device=device)
        elif isinstance(self.inner, HybridDeviceOptimizer) and self.main in self.inner.gpu_params_map_cpu_copy:
            self.inner.gpu_params_map_cpu_copy[self.main].copy_(part)

    def forget(self) -> None:
        """Drop the moments: the state before the first update."""
        if self.main is not None and self.inner is not None:
            self._slots()[0].clear()

    def _held(self, what: str) -> Tensor | None:
        if what == PARAM or self.main is None:
            return self.main
        moment = self._slots()[0].get(what)
        return torch.zeros_like(self.main, dtype=torch.float32) if moment is None else moment.to(self.main.device)

    def _slots(self) -> tuple[dict[str, Tensor], torch.device]:
        """The optimizer's state of this master, and where it lies."""
        assert self.main is not None
        if not isinstance(self.inner, HybridDeviceOptimizer):
            return self.inner.state[self.main], self.main.device
        own = self.inner.param_to_inner_param[self.main]
        for part in self.inner.sub_optimizers:
            if any(own is parameter for group in part.param_groups for parameter in group["params"]):
                return part.state[own], own.device
        raise AssertionError("a hybrid optimizer without one of its parameters")


def masters(tensors: Sequence[Tensor], optimizer: Any) -> list[Master]:
    """The master of each of a rank's parameters or buffers."""
    shared: dict[Tensor, Master] = {}
    whole: dict[Tensor, Any] = {}
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        if isinstance(part, DistributedOptimizer):
            shared |= _shared(part)
        else:
            whole |= {main: part.optimizer for group in part.optimizer.param_groups for main in group["params"]}
    made = []
    for tensor in tensors:
        main = getattr(tensor, "main_param", None)
        main = tensor if main is None else main
        made.append(shared[tensor] if tensor in shared else Master(tensor, main, whole.get(main)))
    return made


def _shared(part: DistributedOptimizer) -> dict[Tensor, Master]:
    found = {}
    for parameter in [parameter for buffer in part.buffers for parameter in buffer.params]:
        master = Master(parameter, None, part.optimizer, group=part.data_parallel_group)
        if parameter in part.model_param_gbuf_map:
            held = part._get_model_param_range_map(parameter)["param"]
            group, order = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group]["params"][order]
            master = replace(master, main=main, start=held.start, stop=held.end)
        found[parameter] = master
    return found
