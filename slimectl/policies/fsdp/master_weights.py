"""AdamW on float32 masters, with gradient clipping."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimectl.architectures.lora import is_adapter
from slimectl.errors import SettingsError
from slimectl.policies.fsdp.model import PackedModel, ParameterNames, decoder_layers
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.protocols import CheckpointFormat


def adamw(masters: list[Tensor], ranks_of: list[int], options: OptimizerOptions) -> torch.optim.AdamW:
    """AdamW over `masters`; `ranks_of` are the tensors' numbers of dimensions before any sharding."""
    matrices = [master for master, ndim in zip(masters, ranks_of, strict=True) if ndim > 1]
    vectors = [master for master, ndim in zip(masters, ranks_of, strict=True) if ndim <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]] or groups[:1],
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        fused=True,
    )


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """The sum of all squares, in float64 across tensors."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(gradients)
    return torch.stack(norms).double().square().sum()


def clip(gradients: list[Tensor], norm: float, limit: float) -> None:
    """Scale all gradients so that their global norm `norm` is at most `limit`."""
    if limit and norm > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MasterWeights:
    """Float32 master weights that the optimizer updates, and their conversion from and to full tensors.

    In float32, and under FSDP2, the masters are the model's own parameters. In bfloat16 on one process the model holds
    a bfloat16 copy: on a CPU that is faster than autocast, which converts every weight in every forward. Frozen weights
    are held in bfloat16 alone, unless that rounds them: then the original is kept too, so that it is saved unchanged.
    """

    def __init__(
        self,
        model: PackedModel,
        *,
        dtype: str,
        device: torch.device,
        mesh: Any | None,
        added: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`added`: parameters that a checkpoint may lack, with their initial values."""
        if dtype not in DTYPES:
            raise SettingsError(f"dtype {dtype!r}: must be {' or '.join(DTYPES)}")
        self.mesh = mesh
        self.added = added or {}
        self.names = ParameterNames(model.hf, optional=self.added)
        self.shapes = {name: parameter.shape for name, parameter in model.hf.named_parameters()}
        if mesh is not None:
            _shard(model, mesh, DTYPES[dtype])
        self.copies = mesh is None and DTYPES[dtype] != torch.float32
        if self.copies:
            for parameter in model.hf.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(DTYPES[dtype])
        _materialise(model, device)
        self.parameters: dict[str, nn.Parameter] = dict(model.hf.named_parameters())
        self.tensors = {name: _local(parameter.data) for name, parameter in self.parameters.items()}
        self.trained = {name: self.tensors[name] for name, p in self.parameters.items() if p.requires_grad}
        """Master weights that the optimizer updates; the others are frozen."""
        if self.copies:
            for name in self.trained:
                self.parameters[name].data = torch.empty_like(self.parameters[name], dtype=DTYPES[dtype])
        self._gradient_sums: dict[str, Tensor] = {}
        """Float32 gradients of bfloat16 copies; the buffers are reused from step to step."""
        self.in_checkpoint: list[tuple[str, str]] = []
        """(checkpoint name, parameter name), in checkpoint order."""
        for name, tensor in self.added.items():
            self.assign(tensor, self.tensors[name])

    def read(self, checkpoint: CheckpointFormat, path: Path) -> None:
        """Fill the masters from a directory. Raises CheckpointError."""
        order = []
        for name, parameter, tensor in self.names.matched(checkpoint.read(path), path, self.shapes):
            if self.copies and parameter not in self.trained:
                self._load_frozen(parameter, tensor)
            else:
                self.assign(tensor, self.tensors[parameter])
            order.append((name, parameter))
        loaded = {parameter for _, parameter in order}
        self.in_checkpoint = order + [
            (name, name) for name in self.added if name not in loaded and not is_adapter(name)
        ]
        self.copy_to_model()

    def _load_frozen(self, name: str, full: Tensor) -> None:
        compute_copy = self.parameters[name].data
        self.assign(full, compute_copy)
        exact = torch.equal(compute_copy.to(full.device, full.dtype), full)
        self.tensors[name] = compute_copy if exact else full.to(compute_copy.device, torch.float32, copy=True)

    def assign(self, full: Tensor, local: Tensor) -> None:
        """Copy `full`, or this rank's shard of it, into `local`."""
        if self.mesh is not None:
            parts = torch.chunk(full, self.mesh.size(), dim=0)
            rank = self.mesh.get_local_rank()
            full = parts[rank] if rank < len(parts) else full[:0]
        with torch.no_grad():
            local.copy_(full)

    def copy_to_model(self) -> None:
        """Copy the master weights into the model's compute copies."""
        if self.copies and self.trained:
            copies = [self.parameters[name].data for name in self.trained]
            torch._foreach_copy_(copies, list(self.trained.values()))

    def accumulate(self) -> None:
        """Accumulate bfloat16 gradients in float32; called after each backward."""
        if not self.copies:
            return
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                master = self.tensors[name]
                if master.grad is None:
                    master.grad = self._gradient_sums.setdefault(name, torch.empty_like(master)).copy_(parameter.grad)
                else:
                    master.grad.add_(parameter.grad)
                parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Set the gradient of each master weight and return them; zeros for parameters without a gradient."""
        for name, master in self.trained.items():
            if not self.copies:
                gradient = self.parameters[name].grad
                master.grad = None if gradient is None else _local(gradient)
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.trained.values() if master.grad is not None]

    def drop_gradients(self) -> None:
        for name, master in self.tensors.items():
            master.grad = self.parameters[name].grad = None


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which is the tensor itself without a mesh."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard(model: PackedModel, mesh: Any, dtype: torch.dtype) -> None:
    """Apply FSDP2 to decoder layers and root; gradients are summed over ranks, because a loss here is a sum."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Casting inputs would rebuild the pack's layout in every layer; hidden states have the embedding's dtype already.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    modules = [*decoder_layers(model.hf), model]
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        # Without this the factor is applied by a pre-multiplied sum, which gloo does not support.
        module.set_force_sum_reduction_for_comms(True)


def _materialise(model: PackedModel, device: torch.device) -> None:
    """Allocate all parameters; `to_empty` alone would lose the buffers and untie tied parameters."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ties = [(alias, first) for alias, first in ParameterNames(model.hf).of_parameter.items() if alias != first]
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = buffer.to(device)
    for alias, first in ties:
        owner, _, attribute = alias.rpartition(".")
        model.hf.get_submodule(owner)._parameters[attribute] = model.hf.get_parameter(first)
