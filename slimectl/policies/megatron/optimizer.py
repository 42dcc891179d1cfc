"""mcore's optimizer with the options of every policy: AdamW on float32 masters, full or sharded over data ranks.

policies.optimizer.lr_at gives every trainer the same learning rate, which is set on the parameter groups before each
update. mcore's OptimizerParamScheduler, stepped after each update, gives the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from slimectl.errors import SettingsError
from slimectl.policies.megatron.config import args_of, refuse_idle
from slimectl.policies.megatron.master_weights import shard_elements
from slimectl.policies.megatron.model import PackedGPT
from slimectl.policies.optimizer import ChunkedAdamW, OptimizerOptions
from slimectl.policies.options import MegatronOptions

_REFUSED = {
    "overlap_grad_reduce": "gradients are reduced once per step, after all of its micro-batches",
    "overlap_param_gather": "weights are read between steps, and the head separately from its module",
    "overlap_param_gather_with_optimizer_step": "weights are read between steps",
    "use_megatron_fsdp": 'use train.backend = "fsdp" for that',
    "average_in_collective": "a loss here is a sum",
    "use_precision_aware_optimizer": 'for 16-bit moments set train.optimizer_state_dtype = "bfloat16"',
    "optimizer": "the optimizer is AdamW",
}


def wrapped(chunks: Sequence[PackedGPT], megatron: MegatronOptions) -> list[DistributedDataParallel]:
    """Wrap the chunks for float32 main gradients. Raises SettingsError for an unsupported argument."""
    config, gradients = chunks[0].config, gradient_config(megatron)
    return [
        DistributedDataParallel(config, gradients, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]


def gradient_config(megatron: MegatronOptions) -> DistributedDataParallelConfig:
    """Return the configuration of gradients. Raises SettingsError for an unsupported argument."""
    args = megatron.args
    for name in (name for name in args if args[name] and name in _REFUSED):
        raise SettingsError(f"megatron.args.{name}: is not possible ({_REFUSED[name]}). Drop it.")
    fields = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": megatron.distributed_optimizer,
        **args_of(args, DistributedDataParallelConfig),
    }
    refuse_idle(args_of(args, DistributedDataParallelConfig), DistributedDataParallelConfig(), acting=_REFUSED)
    return DistributedDataParallelConfig(**fields)


def build(chunks: Sequence[DistributedDataParallel], options: OptimizerOptions, megatron: MegatronOptions) -> Any:
    """Build mcore's optimizer for the parameters that require gradients."""
    config = optimizer_config(chunks[0].config, options, megatron)
    # Without gradients, because views of float32 parameters would not be leaves, which optimizers on the CPU reject.
    with torch.no_grad():
        # Gloo groups are needed only for checkpoints of an old format.
        optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    if options.state_dtype == "bfloat16":
        _round_moments(optimizer)
    set_options(optimizer, options)
    return optimizer


def optimizer_config(config: Any, options: OptimizerOptions, megatron: MegatronOptions) -> OptimizerConfig:
    """Return the configuration of the optimizer of a model with this TransformerConfig. Raises SettingsError."""
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
        "use_distributed_optimizer": megatron.distributed_optimizer,
        # Without a GPU all of it is in host memory already, and mcore's hybrid optimizer only supports copies.
        "optimizer_cpu_offload": megatron.optimizer_cpu_offload and torch.cuda.is_available(),
        "optimizer_offload_fraction": 1.0,
        **args_of(megatron.args, OptimizerConfig),
    }
    refuse_idle(args_of(megatron.args, OptimizerConfig), OptimizerConfig(), acting=_REFUSED)
    try:
        return OptimizerConfig(**fields)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise SettingsError(f"megatron-core rejects the configuration: {' '.join(str(error).split())}") from error


def set_options(optimizer: Any, options: OptimizerOptions) -> None:
    """Set the options on every parameter group. mcore's checkpoints replace them with the options at saving.

    The learning rate is set before each update.
    """
    for inner in inners(optimizer):
        for group in inner.param_groups:
            group |= {"betas": options.betas, "eps": options.eps}
            # mcore's scheduler would do this. Otherwise norms and biases would also decay.
            group["weight_decay"] = options.weight_decay * group["wd_mult"]
            if isinstance(inner, torch.optim.AdamW):
                group["fused"] = True


def _round_moments(optimizer: Any) -> None:
    """Replace the optimizers inside mcore's with ones that keep moments in bfloat16. They have no state yet.

    mcore's own (use_precision_aware_optimizer) needs TransformerEngine, and rounds to the nearest value.
    """
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            part.optimizer = ChunkedAdamW(part.optimizer.param_groups, shards=shard_elements(part))


def inners(optimizer: Any) -> list[Any]:
    """List the torch (or TransformerEngine, or hybrid) optimizers inside mcore's."""
    return [part.optimizer for part in optimizer.chained_optimizers if not part.is_stub_optimizer]


def step(chunks: Sequence[DistributedDataParallel], optimizer: Any, *, lr: float, clip: float) -> tuple[float, bool]:
    """Reduce the gradients, clip and update.

    Returns the norm before clipping, and whether it was finite and above zero. If not, the update is skipped.
    """
    finalize_model_grads(list(chunks), None)
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    updated = 0 < norm < math.inf
    if updated:
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if clip and parameters:
                clip_grad_by_total_norm_fp32(parameters, clip, norm)
            for group in part.param_groups:
                group["lr"] = lr * group["lr_mult"]
        optimizer.step_with_ready_grads()
    drop_gradients(chunks, optimizer)
    return norm, updated


def resume(optimizer: Any, *, updates: int) -> None:
    """Set the step counts that optimizers of apex and TransformerEngine keep per group. torch's are per parameter."""
    for inner in inners(optimizer):
        if not isinstance(inner, torch.optim.AdamW | HybridDeviceOptimizer):
            for group in inner.param_groups:
                group["step"] = updates


def drop_gradients(chunks: Sequence[DistributedDataParallel], optimizer: Any) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
