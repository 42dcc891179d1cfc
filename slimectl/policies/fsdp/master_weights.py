"""AdamW on float32 masters, with gradient clipping."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimectl.architectures.lora import is_adapter
from slimectl.errors import SettingsError
from slimectl.policies.fsdp.model import PackedModel, ParameterNames, Slot, decoder_layers, persistent_buffers
from slimectl.policies.optimizer import Bfloat16AdamW, OptimizerOptions
from slimectl.protocols import CheckpointFormat


def adamw(
    masters: list[Tensor], ranks_of: list[int], options: OptimizerOptions, *, offsets: Mapping[Tensor, int]
) -> torch.optim.AdamW:
    """AdamW over `masters`; `ranks_of` are the tensors' numbers of dimensions before any sharding.

    `offsets`: index of the first element of each shard in its parameter.
    """
    matrices = [master for master, ndim in zip(masters, ranks_of, strict=True) if ndim > 1]
    vectors = [master for master, ndim in zip(masters, ranks_of, strict=True) if ndim <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]] or groups[:1]
    common: dict[str, Any] = {"lr": options.lr, "betas": options.betas, "eps": options.eps}
    if options.state_dtype == "bfloat16":
        return Bfloat16AdamW(groups, offsets=offsets, **common)
    return torch.optim.AdamW(groups, fused=True, **common)


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

    `offload` "optimizer" has masters, sums of gradients and moments in host memory, and copies of the masters on the
    device; "parameters" has all of them there, and FSDP2 brings a layer to the device when it is computed.
    """

    def __init__(
        self,
        model: PackedModel,
        *,
        dtype: str,
        device: torch.device,
        mesh: Any | None,
        added: Mapping[str, Tensor] | None = None,
        offload: str | None = None,
    ) -> None:
        """`added`: parameters that a checkpoint may lack, with their initial values."""
        if dtype not in DTYPES:
            raise SettingsError(f"dtype {dtype!r}: must be {' or '.join(DTYPES)}")
        self.mesh = mesh
        self.added = added or {}
        self.names = ParameterNames(model.hf, optional=self.added)
        self.shapes = {name: parameter.shape for name, parameter in model.hf.named_parameters()}
        offloads = offload == "parameters"
        self._sharded = [] if mesh is None else _shard(model, mesh, DTYPES[dtype], offloads=offloads)
        self.rounds = mesh is None and DTYPES[dtype] != torch.float32
        """Whether the model has weights of another precision than the masters."""
        self.copies = self.rounds or offload == "optimizer"
        """Whether the masters are not the model's own parameters."""
        if self.rounds:
            for parameter in model.hf.parameters():
                parameter.data = parameter.data.to(DTYPES[dtype])
        _materialise(model, device, parameters_on=torch.device("cpu") if offload == "parameters" else device)
        self.parameters: dict[str, nn.Parameter] = dict(model.hf.named_parameters())
        self.tensors = {name: local_part(parameter.data) for name, parameter in self.parameters.items()}
        if self.copies:
            on_host = offload == "optimizer"
            for name, parameter in self.parameters.items():
                if parameter.requires_grad:
                    self.tensors[name] = torch.empty_like(
                        self.tensors[name], dtype=torch.float32, device="cpu" if on_host else device,
                        pin_memory=on_host and device.type == "cuda",
                    )  # fmt: skip
        self.buffers = persistent_buffers(model.hf)
        """Buffers that checkpoints hold: whole on every rank, in float32, and not trained."""
        self.tensors |= self.buffers
        self.trained = {name: self.tensors[name] for name, p in self.parameters.items() if p.requires_grad}
        """Master weights that the optimizer updates; the others are frozen."""
        self._gradient_sums: dict[str, Tensor] = {}
        """Float32 gradients of copies; the buffers are reused from step to step."""
        self.in_checkpoint: list[tuple[str, Slot]] = []
        """(checkpoint name, slot), in checkpoint order."""
        for name, tensor in self.added.items():
            self.assign(tensor, self.tensors[name])

    def read(self, checkpoint: CheckpointFormat, path: Path) -> None:
        """Fill the masters from a directory. Raises CheckpointError."""
        order = []
        for name, slot, tensor in self.names.matched(checkpoint.read(path), path):
            if self.rounds and slot.parameter not in self.trained and slot.parameter not in self.buffers:
                self._load_frozen(slot, tensor)
            else:
                self.assign(tensor, self.tensors[slot.parameter], slot)
            order.append((name, slot))
        loaded = {slot.parameter for _, slot in order}
        self.in_checkpoint = order + [
            (name, Slot(name)) for name in self.added if name not in loaded and not is_adapter(name)
        ]
        self.copy_to_model()

    def _load_frozen(self, slot: Slot, full: Tensor) -> None:
        compute_copy = self.parameters[slot.parameter].data
        self.assign(full, compute_copy, slot)
        exact = torch.equal(compute_copy[slot.index].to(full.device, full.dtype), full)
        # Experts share a tensor: once one of them is rounded, all have an original.
        original = compute_copy if slot.index is ... else self.tensors[slot.parameter]
        self.tensors[slot.parameter] = original if exact or original.dtype == torch.float32 else original.float()
        if not exact or slot.index is not ...:
            self.assign(full, self.tensors[slot.parameter], slot)

    def assign(self, full: Tensor, local: Tensor, slot: Slot | None = None) -> None:
        """Copy `full`, or this rank's shard of it, into `local`; an expert's tensor into its part of `local`."""
        with torch.no_grad():
            if slot is not None and isinstance(slot.index, tuple):
                self._assign_expert(full, local, slot.parameter, *slot.index)
                return
            if self.mesh is not None and (slot is None or slot.parameter not in self.buffers):
                parts = torch.chunk(full, self.mesh.size(), dim=0)
                rank = self.mesh.get_local_rank()
                full = parts[rank] if rank < len(parts) else full[:0]
            local.copy_(full)

    def _assign_expert(self, full: Tensor, local: Tensor, parameter: str, expert: int, rows: slice) -> None:
        if self.mesh is not None:
            # FSDP2 shards the first dimension, here the experts, as torch.chunk does.
            expert -= self.mesh.get_local_rank() * -(-self.shapes[parameter][0] // self.mesh.size())
        if 0 <= expert < local.shape[0]:
            local[expert, rows].copy_(full)

    def offsets(self) -> dict[Tensor, int]:
        """Index of the first element of each trained shard in its parameter."""
        if self.mesh is None:
            return {}
        size, rank = self.mesh.size(), self.mesh.get_local_rank()
        rows = {name: -(-self.shapes[name][0] // size) for name in self.trained}
        return {
            master: rank * rows[name] * self.shapes[name].numel() // self.shapes[name][0]
            for name, master in self.trained.items()
        }

    def copy_to_model(self) -> None:
        """Copy the master weights into the model's compute copies.

        FSDP2 leaves the root's weights gathered after a forward without backward: the next one would compute with old
        ones.
        """
        for module in self._sharded:
            module.reshard()
        if self.copies and self.trained:
            copies = [local_part(self.parameters[name].data) for name in self.trained]
            torch._foreach_copy_(copies, list(self.trained.values()))

    def accumulate(self) -> None:
        """Accumulate the gradients of copies in float32; called after each backward."""
        if not self.copies:
            return
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                master, gradient = self.tensors[name], local_part(parameter.grad)
                if master.grad is None:
                    master.grad = self._gradient_sums.setdefault(name, torch.empty_like(master)).copy_(gradient)
                else:
                    master.grad.add_(gradient.to(master.device))
                parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Set the gradient of each master weight and return them; zeros for parameters without a gradient."""
        for name, master in self.trained.items():
            if not self.copies:
                gradient = self.parameters[name].grad
                master.grad = None if gradient is None else local_part(gradient)
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.trained.values() if master.grad is not None]

    @property
    def gradient_sums(self) -> list[Tensor]:
        """Memory of the sums between steps, when it holds no gradient."""
        return [tensor for name, tensor in self._gradient_sums.items() if self.tensors[name].grad is None]

    def drop_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            self.tensors[name].grad = parameter.grad = None


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which is the tensor itself without a mesh."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard(model: PackedModel, mesh: Any, dtype: torch.dtype, *, offloads: bool) -> list[Any]:
    """Apply FSDP2 to decoder layers and root, and return them; gradients are summed over ranks, as a loss is a sum."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Casting inputs would rebuild the pack's layout in every layer; hidden states have the embedding's dtype already.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Memory is pinned for copies from and to an accelerator; without one torch (2.13) refuses to.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offloads else OffloadPolicy()
    modules: list[Any] = [*decoder_layers(model.hf), model]
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        # Without this the factor is applied by a pre-multiplied sum, which gloo does not support.
        module.set_force_sum_reduction_for_comms(True)
    return modules


def _materialise(model: PackedModel, device: torch.device, *, parameters_on: torch.device) -> None:
    """Allocate all parameters; `to_empty` alone would lose the buffers and untie tied parameters."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ties = list(ParameterNames(model.hf).ties)
    model.to_empty(device=parameters_on)
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = buffer.to(device)
    for alias, first in ties:
        owner, _, attribute = alias.rpartition(".")
        model.hf.get_submodule(owner)._parameters[attribute] = model.hf.get_parameter(first)
